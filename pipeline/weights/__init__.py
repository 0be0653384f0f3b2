"""The policy's weights: one published copy in shared memory, and the models whose parameters are views of it."""
