"""A cluster that only keeps time: the real dispatcher and scheduler over measured step costs. Pure, no clock, no torch."""
