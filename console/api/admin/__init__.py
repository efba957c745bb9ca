"""Endpoints under /admin/: operator actions on models, and the calls and events of attached consoles."""
