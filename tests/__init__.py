"""A package, so that one of that name which a machine has elsewhere does not come before it."""
