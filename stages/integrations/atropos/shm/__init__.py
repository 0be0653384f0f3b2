"""The shared-memory way in: an environment's end, the gateway's end, and what finds one from the other."""
