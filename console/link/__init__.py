"""EngineLink: what a screen may ask of an engine, in this process or elsewhere."""
