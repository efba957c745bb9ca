"""CUDA without a card: the host's time of its steps, and the resources of its kernels."""
