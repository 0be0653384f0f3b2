"""The torch trainer and what it stands on: micro-batches, scoring, checkpoints, ranks."""
