"""The KV cache: pages, codes of 8 and 4 bits, contiguous staging."""
