"""A flow on an event loop in a thread, which feeds the queue of a trainer that is not penstock's."""
