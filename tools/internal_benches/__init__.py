"""The costs of the engine, its workers, the API and the console: `python -m tools.internal_benches --help`"""
