"""Reading of weights with torch, for all backends: safetensors files, and the quantised formats in them."""
