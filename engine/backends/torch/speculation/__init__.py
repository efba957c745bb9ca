"""Speculative decoding: n-grams, a draft model, and what pays."""
