"""GGUF, llama.cpp's format: one file with a model's shape, tokenizer and weights. No torch here."""
