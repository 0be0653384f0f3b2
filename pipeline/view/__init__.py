"""The view of a run: a live table on a terminal, plain lines elsewhere."""
