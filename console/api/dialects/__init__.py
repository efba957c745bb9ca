"""One package per dialect, an API that clients know from another server. `base.py` says what one declares."""
