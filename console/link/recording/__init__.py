"""Recordings of snapshots: file format, writer, reader, replay link."""
