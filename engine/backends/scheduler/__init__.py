"""Scheduling of sequences into steps, and the pool of KV pages; without torch."""
