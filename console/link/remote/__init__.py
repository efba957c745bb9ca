"""EngineLink over HTTP to another instance."""
