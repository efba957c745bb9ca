"""Measurements run by hand: steps, throughput, latency, perplexity, speculation, autotune."""
