"""Recorded decode steps, layers of GGUF codes, and transfers to and from a device."""
