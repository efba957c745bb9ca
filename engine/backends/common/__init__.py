"""Checkpoints and the needs of backends, as every backend, the engine and the console may know them. No torch here."""
