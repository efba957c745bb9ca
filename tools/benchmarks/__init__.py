"""This engine and others: the same model, work and machine, in turns. `python -m tools.benchmarks --help`"""
