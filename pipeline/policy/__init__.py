"""The policy's weights: one published copy in shared memory, and whoever reads it as its own parameters."""
