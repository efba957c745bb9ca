"""The ericllm command: main, and one module per command."""
