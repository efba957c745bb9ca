"""Settings: the schema, their sources, config.toml, rows for display, changes while running."""
