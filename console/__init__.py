"""The operator's console, the HTTP API and the `ericllm` command."""

DISTRIBUTION = "ericllm"
"""Whose package this is, which `ericllm_main` looks for: others may have one of this name."""
