"""The scripts behind every number that README and docs quote.

`make bench` runs these:

python -m benchmarks.transport     throughput, beside the machine's copy limit and other transports (contestants/)
python -m benchmarks.latency       how long a group is on its way: alone, under load, beside a busy trainer
python -m benchmarks.cost          processor time, memory, and more producers than cores
python -m benchmarks.end_to_end    a whole pipeline with a sink that only counts, by stage
python -m benchmarks.atropos       scored groups of Atropos over HTTP and shared memory, beside Atropos' own server
python -m benchmarks.training      a step of TorchTrainer, beside what the matrix products alone would take

and these run by themselves:

python -m benchmarks.cpu           what one group costs each side: what a profile is held against
python -m benchmarks.journal       what the journal costs a pipeline, beside what the disk takes
python -m benchmarks.halt          a trainer that stands still for half a minute, and what its sources do then
python -m benchmarks.soak          workers killed, stopped and started anew, for as long as you like
python -m benchmarks.atropos_load  a gateway and many environments of Atropos, with trainers that come and go
"""

from importlib.util import find_spec

from penstock.errors import MissingExtra

MISSING = [name for name in ("matplotlib", "rich", "xxhash") if find_spec(name) is None]
"""What every script here needs, and penstock does not bring."""

if MISSING:
    raise MissingExtra(f"benchmarks need {', '.join(MISSING)}, not installed here: pip install -e '.[bench]'")
