"""Prompts to groups: the source, environments, bounds on lag, evaluation, samples."""
