"""The trainer's stage: steps, evaluations, the best checkpoint."""
