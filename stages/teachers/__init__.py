"""Who tells how likely a teacher finds tokens: in torch, or behind a server."""
