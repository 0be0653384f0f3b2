"""Agents that drive: they ask for completions themselves, and each token that is sampled for them is accounted for."""
