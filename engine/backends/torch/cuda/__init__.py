"""Recorded decode steps, and transfers to and from a device."""
