"""Widgets and drawing that several screens share."""
