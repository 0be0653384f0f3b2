"""Compose stages, run them and account for their records. Knows no reward, no loss and no foreign framework.

channels/    the transports of records: memory, shm and tcp behind one pair of ends
policy/      the policy's weights: published once, attached as views
processes/   workers and outside servers: started, watched, counted, stopped

Beside them: the protocol of a stage; building, checking, describing and running a flow; the ledger; telemetry; the
journal; errors.
"""
