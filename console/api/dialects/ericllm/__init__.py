"""EricLLM's and vLLM's own endpoints: /generate, /tokenize, /detokenize, /version."""
