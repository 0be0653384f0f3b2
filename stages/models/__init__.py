"""Models in folders as transformers saves them."""
