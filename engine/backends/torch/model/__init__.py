"""The decoder: blocks, attention, MLP, norms, RoPE, adapters, and the plan of a step."""
