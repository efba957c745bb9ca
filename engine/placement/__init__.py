"""Placement: what a model needs of memory, and which workers go to which devices. Pure but for reading files."""
