"""What the gateway knows: environments, groups that wait, batches, leases. No clock, no socket, no event loop."""
