"""Who generates: policies, and engines whose weights can be brought up to date; in torch, or behind a server."""
