"""A running pipeline, from its first stage to its report."""
