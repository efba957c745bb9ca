"""The Insight page: latency breakdown, tokens, device utilisation and energy."""
