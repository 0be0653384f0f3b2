"""Share protocols, sampling parameters and stacks of groups between stages and engines."""
