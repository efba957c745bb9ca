"""Engine and API on one loop: headless, loading, logs, operator actions, doctor, estimate."""
