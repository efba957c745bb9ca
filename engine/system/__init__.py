"""Small helpers for the operating system and Python: files, child processes, logs, tasks."""
