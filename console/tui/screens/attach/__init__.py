"""Rows and dialogs of a console that is attached to other instances or replays a recording."""
