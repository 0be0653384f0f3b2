"""The state of the gateway: environments, groups that wait, batches that are handed out. No clock, socket or loop."""
