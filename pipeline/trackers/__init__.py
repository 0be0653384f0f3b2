"""Trackers: destinations of the metrics, samples and hyper-parameters of a run."""
