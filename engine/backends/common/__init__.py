"""What every backend, the engine and the console may know of a checkpoint and of a backend's needs, without torch."""
