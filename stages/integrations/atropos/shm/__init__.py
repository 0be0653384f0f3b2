"""The shared-memory way in: the end of an environment, and the end of the gateway."""
