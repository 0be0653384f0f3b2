"""Compose stages, run them and account for their records. Knows no reward, no loss and no foreign framework.

util/         errors of the system, exception groups, waits
accounting/   the ledger of trajectories, and metrics
channels/     the transports of records: memory, shm and tcp behind one pair of ends
graph/        stages, the edges between them, and the checks before a run
weights/      the policy's weights: published once, attached as views
servers/      programs of others: started, watched, ended
workers/      workers of a stage: started or joined, watched, counted, stopped
durability/   the journal, and the folder of a run
runtime/      a running pipeline: tasks, signals, report
testing/      tools to test stages and channels
"""
