"""penstock."""
