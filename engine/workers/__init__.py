"""A model's workers as the engine sees them: the pool, each replica, its health, and the state it should be in."""
