"""Benches: a model measured on this machine or behind any server, and the results kept.

`ericllm bench` runs them from a command line, `bench_runs.py` for a screen, on an engine that serves.
"""
