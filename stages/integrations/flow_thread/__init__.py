"""A flow on an event loop in a thread. It feeds the queue of a foreign trainer."""
