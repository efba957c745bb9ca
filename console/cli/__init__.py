"""The ericllm command: main, and one file per command, whose first line says `ericllm NAME`."""
