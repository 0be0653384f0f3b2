"""Processes that a pipeline starts: the workers of a stage, and servers of others; watched, counted and stopped."""
