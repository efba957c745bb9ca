"""HTTP plumbing: middlewares, authentication, keys, limits, errors, observability, connections, listening, TLS."""
