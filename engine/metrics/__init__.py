"""Metrics: counters and histograms, session and device statistics, and the snapshots made of them."""
