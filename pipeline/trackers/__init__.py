"""Trackers: where metrics, samples and hyper-parameters of a run are written."""
