"""The Logs screen."""
