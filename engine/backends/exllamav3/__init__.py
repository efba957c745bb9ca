"""The ExLlamaV3 backend: EXL3 models on NVIDIA GPUs, computed from their packed weights."""
