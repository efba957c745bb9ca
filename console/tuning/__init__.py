"""Tuning: live knobs, effects of changes, tuned profiles, autotune."""
