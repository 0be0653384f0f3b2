"""Evaluation: prompts kept apart, completed with the newest weights every few steps, beside training."""
