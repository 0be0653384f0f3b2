"""Compose stages, run them and account for their records. Knows no reward, no loss and no foreign framework.

util/         errors of the system, exception groups, waits
accounting/   the ledger of trajectories, and metrics
channels/     the transports of records: memory, shm and tcp behind one pair of ends
graph/        stages, the edges between them, and the checks before a run
processes/    workers and outside servers: started, watched, counted, stopped
weights/      the policy's weights: published once, attached as views
durability/   the journal, and the folder of a run
runtime/      a running pipeline: tasks, signals, report
testing/      tools with which stages and channels are tested
"""
