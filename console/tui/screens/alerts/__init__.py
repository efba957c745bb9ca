"""The Alerts page: what went wrong, what was done about it and what to do."""
