"""A script that prints a line when its run begins to connect to a cluster."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import anyio
from tests.processes.script_of_a_stopped_run import write_line
from tests.processes.worker_sinks import Commit
from tests.ray_real.stages import SampleForever

from penstock import ray, source

ray_itself: Any = import_module("ray")
connect = ray_itself.init


def tell_and_connect(**options: Any) -> Any:
    write_line("connecting")
    return connect(**options)


if __name__ == "__main__":
    ray_itself.init = tell_and_connect
    anyio.run(source(SampleForever(), on=ray(workers=1, num_cpus=0.5, address=sys.argv[1])).sink(Commit()).run)
