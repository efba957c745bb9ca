"""A cluster that only keeps time: the real dispatcher and scheduler over measured step costs. No clock, no torch."""
