"""Programs for maintainers; not in the wheel."""
