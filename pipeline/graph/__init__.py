"""Stages, the edges between them, and the facts about both before they run."""
