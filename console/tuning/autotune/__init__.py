"""Autotune: search for the settings with the best throughput within an SLO."""
