"""Connect to a Ray cluster, and reserve the places of a stage's workers.

All calls into Ray that block are made in threads. The cluster is the user's: it is disconnected from only by the run
that connected to it, and everything that was reserved or created is released.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from ..errors import ClusterUnreachable, PlacementTimedOut
from ..graph.placement import Ray
from ..util.extras import extra
from .ray_head import RayHead

REACH_S = 5.0
"""Bound on the attempt to connect to a cluster."""

RECONNECT_TIMEOUT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's variable for the time until it ends a process that does not reach the head."""

KEPT_S = 3600.0
"""Its value for this process: it notices the loss itself."""

EXIT_S = 20.0
"""Seconds that the end of this process may take once the head is lost."""

T = TypeVar("T")


class Reservation:
    """The places of a stage's workers in a cluster: one bundle of a placement group for each."""

    def __init__(self, group: Any, on: Ray, head: RayHead, *, for_actors: dict[str, Any]) -> None:
        self.head = head
        self._group = group
        self._on = on
        self._for_actors = for_actors

    def options_of(self, index: int) -> dict[str, Any]:
        """Return Ray's options for the actor of worker `index`."""
        on, strategies = self._on, import_module("ray.util.scheduling_strategies")
        return {
            "num_cpus": on.num_cpus,
            "num_gpus": on.num_gpus,
            "resources": dict(on.resources),
            "max_restarts": 0,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=index
            ),
            **self._for_actors,
        }


def import_ray() -> Any:
    """Import Ray.

    Raises:
        MissingExtra: Ray is not installed.
    """
    with extra("ray", "a stage on ray()"):
        return import_module("ray")


@asynccontextmanager
async def reserved(on: Ray, stage: str) -> AsyncIterator[Reservation]:
    """Reserve the places of the workers of `stage` in the cluster, within the body.

    Raises:
        MissingExtra: Ray is not installed.
        ClusterUnreachable: there is no cluster at the address.
        PlacementTimedOut: the cluster did not reserve them in time.
    """
    ray = import_ray()
    ours = not ray.is_initialized()
    if ours:
        await in_thread(_connect, ray, on)
    head = RayHead(ray.get_runtime_context().gcs_address)
    try:
        for_actors = {} if ours or not on.runtime_env else {"runtime_env": dict(on.runtime_env)}
        group = await in_thread(_create_group, on)
        try:
            if not await in_thread(partial(group.wait, timeout_seconds=on.placement_timeout_s)):
                raise PlacementTimedOut(await in_thread(_table, ray, on, stage))
            yield Reservation(group, on, head, for_actors=for_actors)
        finally:
            if not head.lost:
                with anyio.CancelScope(shield=True):
                    await in_thread(_remove_group, group)
    finally:
        if ours and head.lost:
            _abandon()
        elif ours:
            with anyio.CancelScope(shield=True):
                await in_thread(ray.shutdown)


def _abandon() -> None:
    """Bound the end of this process: Ray delays it to ask a lost head, for 15 seconds or without end."""
    worker: Any = import_module("ray._private.worker")
    if sys.excepthook is worker.custom_excepthook:  # it reports exceptions to the head
        sys.excepthook = worker.normal_excepthook
    ending = threading.Event()
    threading.Thread(target=_exit_after, args=(ending,), name="penstock exit", daemon=True).start()
    atexit.register(ending.set)  # called before the function of Ray, which was registered first


def _exit_after(ending: threading.Event) -> None:
    ending.wait()
    time.sleep(EXIT_S)
    os._exit(1)


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call a function of Ray that blocks, and that ends when Ray answers."""
    return await anyio.to_thread.run_sync(function, *arguments, abandon_on_cancel=False)


def _connect(ray: Any, on: Ray) -> None:
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that it cannot handle SIGTERM in a thread, which it need not
    try:
        _check_reachable(on.address)
        with _without_ends_by_ray():
            ray.init(address=on.address, runtime_env=dict(on.runtime_env) or None, configure_logging=False)
    except OSError as error:
        raise ClusterUnreachable(
            f"expected a Ray cluster at address={on.address!r}, got {error}: start one with `ray start --head`, or let "
            f"the run start one with address='local'"
        ) from error
    finally:
        logger.setLevel(level)


@contextmanager
def _without_ends_by_ray() -> Iterator[None]:
    """Have Ray leave SIGTERM, and the loss of its head, to this process; for a body that connects to a cluster.

    Otherwise it installs a handler in C++ that aborts the process three seconds after the signal, and ends the process
    a minute after the loss: in both cases the run may still be writing its checkpoint.
    """
    constants: Any = import_module("ray._private.ray_constants")
    before = constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER, os.environ.get(RECONNECT_TIMEOUT)
    constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER, os.environ[RECONNECT_TIMEOUT] = True, f"{KEPT_S:.0f}"
    try:
        yield
    finally:
        constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER, timeout = before
        os.environ.pop(RECONNECT_TIMEOUT)
        if timeout is not None:
            os.environ[RECONNECT_TIMEOUT] = timeout


def _check_reachable(address: str) -> None:
    """Connect to HOST:PORT once: without a listener there, Ray would try for minutes.

    Raises:
        OSError: no connection can be made.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()


def _create_group(on: Ray) -> Any:
    groups = import_module("ray.util.placement_group")
    return groups.placement_group([on.bundle or {"CPU": 0.001}] * on.count, strategy=on.strategy)


def _remove_group(group: Any) -> None:
    import_module("ray.util.placement_group").remove_placement_group(group)


def _table(ray: Any, on: Ray, stage: str) -> str:
    """Return the reason why the workers could not be placed: the resources asked, and those free by node."""
    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()  # noqa: SLF001 (no other)
    names = list(dict.fromkeys(["CPU", "GPU", *on.resources]))
    rows = [["node", *(f"{name} free" for name in names)]]
    for node in ray.nodes():
        if node["Alive"]:
            here, total = free.get(node["NodeID"], {}), node["Resources"]
            rows.append(
                [
                    node["NodeManagerAddress"],
                    *(f"{here.get(name, 0):g} of {total.get(name, 0):g}" for name in names),
                ]
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    asked = ", ".join(f"{amount:g} {name}" for name, amount in on.bundle.items())
    return (
        f"expected places for the {on.count} workers of {stage} within placement_timeout_s={on.placement_timeout_s:g}, "
        f"each with {asked or 'nothing'} ({on.strategy}); the cluster has\n\n{table}\n\n"
        f"ask for less, free what others hold, or add nodes"
    )
