"""The ledger of trajectories, and the metrics of a run."""
