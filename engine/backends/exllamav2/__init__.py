"""The ExLlamaV2 backend: the library's generator behind the contract of a backend."""
