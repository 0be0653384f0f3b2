"""Atropos: its environments as sources, its trainers as sinks."""
