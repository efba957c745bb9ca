"""The dashboard: advice, devices, workers, throughput and requests."""
