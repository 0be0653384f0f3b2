"""The scripts behind every number that README and docs quote.

`make bench` runs these:

python -m benchmarks.transport     throughput, beside the machine's copy limit and other transports (contestants/)
python -m benchmarks.latency       time of a group in transit: alone, under load, beside a busy trainer
python -m benchmarks.cost          processor time, memory, and more producers than cores
python -m benchmarks.end_to_end    a whole pipeline with a sink that only counts, by stage
python -m benchmarks.atropos       scored groups of Atropos over HTTP and shared memory, beside Atropos' own server
python -m benchmarks.training      a step of TorchTrainer, beside the time of its matrix products alone

and these are run separately:

python -m benchmarks.cpu           processor time of one group on each side, to compare profiles with
python -m benchmarks.journal       cost of the journal in a pipeline, beside the speed of the disk
python -m benchmarks.halt          a trainer that stops for half a minute, and its sources meanwhile
python -m benchmarks.soak          workers killed, stopped and restarted, for any time
python -m benchmarks.many_senders  one receiver with as many senders as descriptors permit, and its restart
python -m benchmarks.gpu           on a GPU, in eight minutes: steps, kernels, sampling, publication, a run
python -m benchmarks.weights       weights over tcp and through a folder, beside shared memory and a plain TCP copy
python -m benchmarks.atropos_load  a gateway and many environments of Atropos, with trainers that die and restart
"""

from importlib.util import find_spec

from penstock.errors import MissingExtra

MISSING = [name for name in ("matplotlib", "rich", "xxhash") if find_spec(name) is None]
"""Requirements of the scripts that penstock does not have."""

if MISSING:
    raise MissingExtra(f"benchmarks need {', '.join(MISSING)}, not installed here: pip install -e '.[bench]'")
