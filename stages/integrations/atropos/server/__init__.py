"""The gateway over HTTP: its endpoints, the stages that serve them, and the server by itself."""
