"""Groups to batches."""
