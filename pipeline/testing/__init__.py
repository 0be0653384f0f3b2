"""Tools to test stages and channels, also those of users."""
