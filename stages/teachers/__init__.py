"""Teachers return the likeliest tokens and their log-probabilities: in torch, or at an inference server."""
