"""Parts that backends over torch share: safetensors files, quantized formats, kinds of torch errors."""
