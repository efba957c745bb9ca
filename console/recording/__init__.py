"""Recordings: what a console showed, kept in a file, and shown again."""
