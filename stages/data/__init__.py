"""Prompts by number: rows of a file or a list, in a seeded order, split and mixed."""
