"""Channels move records from one stage to the next: the transports memory, shm and tcp behind one pair of ends."""
