"""The torch trainer and its parts: micro-batches, scoring, checkpoints, ranks."""
