"""How stages are composed, run and accounted for. Nothing here knows a reward, a loss or a foreign framework.

channels/    how records travel: memory, shm and tcp behind one pair of ends
policy/      the policy's weights: published once, attached as views
processes/   workers and outside servers: started, watched, counted, stopped

Beside them: the protocol of a stage and how a flow is built, checked, described and run; the ledger; telemetry; the
journal; errors.
"""
