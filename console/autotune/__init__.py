"""Autotune: the settings that give a model on this hardware the most throughput within an SLO, found by trying them.

`search` and what it imports is pure; `rig` turns a running engine and measures it; `tuner` lets the one drive the
other.
"""
