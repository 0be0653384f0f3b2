"""An HTTP endpoint for agents: each rollout has a key, and is called as a provider of models is."""
