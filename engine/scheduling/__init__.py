"""Scheduling: one queue per model, with priorities and fair shares, and the routing of requests to workers. Pure."""
