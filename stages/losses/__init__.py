"""Losses of a trainer: terms with a value for each token, and their aggregation to one number."""
