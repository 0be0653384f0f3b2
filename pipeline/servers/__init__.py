"""Programs of others that a run starts: servers and interpreters; watched and ended with all their processes."""
