"""Samples of what a step trained."""
