"""Requests: what a caller asks for, whether it is admitted, its life until the last delta, and what became of it."""
