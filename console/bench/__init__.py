"""Benches: a model measured on this machine or behind any server, and the results kept.

`command` is `ericllm bench`; `benches` runs them on an engine that serves, for a screen. What the engine itself costs
is measured here too (`overhead`, `workers`, `screen`, `http`).
"""
