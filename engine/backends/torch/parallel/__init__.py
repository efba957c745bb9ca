"""Tensor parallelism: one model over several processes, each with a part of every layer."""
