"""The state of the gateway: environments, groups that wait, batches under a lease. No clock, socket or event loop."""
