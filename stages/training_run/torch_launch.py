"""The ranks of a configured run: processes that train one model together, each on a device of its own.

`penstock run` starts them on this host by torch.distributed (`start_ranks`); on several hosts torchrun does. Each rank
joins the others (`joined`), and rank 0 runs the pipeline. Knows no stage.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..._pipeline.errors import InvalidConfig, PeerLost, ServerFailed
from ..._pipeline.workers.worker import die_with
from .own_rank import SERVER_DIED, is_rank
from .run_config import RunConfig
from .torch_critic_parts import empty_value_model
from .torch_devices import device_of
from .torch_memory import is_sharded
from .torch_parts import RunParts, digest_of

TIMEOUT = timedelta(minutes=30)
"""Bound on a collective operation: a rank may compile its model, or measure its memory, while the others wait."""


def start_ranks(config: RunConfig, command: Sequence[str]) -> int:
    """Run `command` of this interpreter on every rank until all have ended; return the status of the first that failed.

    A rank that fails has said why. Signals that stop a run are passed on. Blocks.

    Raises:
        InvalidConfig: there are fewer GPUs than ranks.
        PeerLost: a rank was killed by a signal; the others were ended.
        ServerFailed: a server of rank 0 died, likewise.
    """
    count = config.placement.trainers
    _check_devices(config, count)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it prints each failure as a table
    launched = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="penstock",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(launched, sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            raise PeerLost(
                f"rank {rank} of {count} was killed by {failure.signal_name()}: run the command again, and the run "
                f"goes on from its last checkpoint"
            ) from None
        if failure.exitcode == SERVER_DIED:
            raise ServerFailed(
                f"rank {rank} of {count} ended because a server died, see above: run the command again, and the run "
                f"goes on from its last checkpoint"
            ) from None
        return int(failure.exitcode)
    except SignalException as error:
        return 128 + error.sigval
    return 0


@contextmanager
def joined(parts: RunParts) -> Iterator[bool]:
    """Join the other ranks within the body, and yield whether each has a part of the model.

    Raises:
        InvalidConfig: this process is no rank, or there are more or fewer than configured, or fewer GPUs on this host,
            or a rank has another configuration.
    """
    config, count = parts.config, parts.config.placement.trainers
    if not is_rank():
        raise InvalidConfig(
            f"config: placement.trainers: expected {count} ranks, got one process: start them by `penstock run`, or by "
            f"torchrun --nproc-per-node {count}"
        )
    die_with(os.getppid())
    if (started := int(os.environ["WORLD_SIZE"])) != count:
        raise InvalidConfig(f"config: placement.trainers: expected {started}, as torchrun has ranks, got {count}")
    _check_devices(config, int(os.environ["LOCAL_WORLD_SIZE"]))
    backend = "cpu:gloo,cuda:nccl" if device_of(config).type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        _check_equal(config)
        yield _agreed(is_sharded(config, parts.empty_model(), empty_value_model(config)))
    finally:
        dist.destroy_process_group()


def _check_devices(config: RunConfig, count: int) -> None:
    """Check that each of `count` ranks of this host has a GPU, unless they train on the processor."""
    if device_of(config).type != "cuda":
        return
    if count > (found := torch.cuda.device_count()):
        raise InvalidConfig(
            f"config: placement.trainers: expected at most {found} on this host, one for each GPU, got {count}: lower "
            f"it, or set placement.device=cpu"
        )


def _check_equal(config: RunConfig) -> None:
    """Check that all ranks have the configuration of rank 0; each names the first that differs."""
    own = torch.frombuffer(bytearray.fromhex(digest_of(config)), dtype=torch.uint8)
    all_of = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of, own)
    for rank, digest in enumerate(all_of):
        if not torch.equal(digest, all_of[0]):
            raise InvalidConfig(
                f"config: expected one configuration on all ranks, got another one on rank {rank}: start them with the "
                f"same file and values"
            )


def _agreed(value: bool) -> bool:  # noqa: FBT001 (of one rank)
    """Return whether `value` is true on any rank."""
    found = torch.tensor([value], dtype=torch.uint8)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)
