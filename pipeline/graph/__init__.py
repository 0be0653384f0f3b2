"""Stages, the edges between them, and what is known of both before they run."""
