"""Helpers that know no record: errors of the system, tasks, files."""
