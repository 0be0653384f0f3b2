"""Helpers that know nothing of records: errors of the system, tasks, files."""
