"""The engine: models, their workers and requests, and the backends that compute."""

DISTRIBUTION = "ericllm"
"""Whose package this is, which `ericllm_main` looks for: others may have one of this name."""
