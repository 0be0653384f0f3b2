"""The scripts behind every number that README and docs quote; `make bench` runs all but the last.

python -m benchmarks.transport     throughput, beside the machine's copy limit and other transports (contestants/)
python -m benchmarks.latency       how long a group is on its way: alone, under load, beside a busy trainer
python -m benchmarks.cost          processor time, memory, and more producers than cores
python -m benchmarks.end_to_end    a whole pipeline with a sink that only counts, by stage
python -m benchmarks.atropos       scored groups of Atropos over HTTP and shared memory, beside Atropos' own server
python -m benchmarks.training      a step of TorchTrainer, beside what the matrix products alone would take
python -m benchmarks.cpu           what one group costs each side: what a profile is held against
"""
