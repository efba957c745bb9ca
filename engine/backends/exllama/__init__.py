"""Common parts of the backends over the ExLlama libraries: import, load, requests, generator."""
