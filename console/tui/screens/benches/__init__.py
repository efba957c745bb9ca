"""The benchmarks: the form of a run, its progress, results and comparisons."""
