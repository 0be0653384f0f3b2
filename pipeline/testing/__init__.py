"""Tools with which stages and channels are tested, also those of users."""
