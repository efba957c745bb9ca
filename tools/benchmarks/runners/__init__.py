"""One engine each, driven over standard input and output; all but `ours` run in a venv of their own."""
