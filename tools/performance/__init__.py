"""What is measured by hand: steps, throughput, latency, perplexity, speculation, autotune."""
