"""Workers on hosts with several NUMA nodes: real processes, which find made-up nodes and GPUs of this host."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.namespaces import mounted, printed_by

PROCESSORS = sorted(os.sched_getaffinity(0))

HALVES = [",".join(map(str, half)) for half in (PROCESSORS[: len(PROCESSORS) // 2], PROCESSORS[len(PROCESSORS) // 2 :])]
"""The processors of two nodes, as the kernel writes a list of them."""

pytestmark = pytest.mark.skipif(len(PROCESSORS) < 2, reason="needs two processors")


def nodes(folder: Path, *processors: str) -> Mapping[Path, Path]:
    """Write NUMA nodes with these processors; return where a command has to find them."""
    for number, each in enumerate(processors):
        node = folder / "nodes" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{each}\n")
    (folder / "nodes").mkdir(exist_ok=True)
    return {Path("/sys/devices/system/node"): folder / "nodes"}


def gpus(folder: Path, *of_nodes: int) -> Mapping[Path, Path]:
    """Write GPUs of these nodes; return where a command has to find them."""
    for number, node in enumerate(of_nodes):
        address = f"0000:{number + 16:02X}:00.0"
        (folder / "driver" / "nvidia" / "gpus" / address).mkdir(parents=True)
        device = folder / "devices" / address.lower()
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return {Path("/proc/driver"): folder / "driver", Path("/sys/bus/pci/devices"): folder / "devices"}


def workers(count: int, folders: Mapping[Path, Path], temporary: Path, **environment: str) -> list[tuple[str, str]]:
    """Run workers that find `folders`; return the processors of each, and what the statistics say of it."""
    assignments = [f"{name}={value}" for name, value in {"TMPDIR": str(temporary), **environment}.items()]
    command = [*mounted(folders), "env", "-u", "OMP_NUM_THREADS", "-u", "CUDA_VISIBLE_DEVICES", *assignments]
    printed = printed_by(command, "-m", "tests.processes.script_of_numa", str(count))
    return [(printed[f"processors of {index}"], printed[f"state of {index}"]) for index in range(count)]


@pytest.mark.long
def test_workers_of_a_host_are_bound_to_its_nodes_evenly(tmp_path: Path) -> None:
    bound = workers(4, nodes(tmp_path, *HALVES, ""), tmp_path)

    assert Counter(bound) == {(HALVES[0], "node 0"): 2, (HALVES[1], "node 1"): 2}


@pytest.mark.long
def test_a_worker_that_can_use_more_processors_than_a_node_has_is_not_bound(tmp_path: Path) -> None:
    folders = nodes(tmp_path, *HALVES)

    ((processors, said),) = workers(1, folders, tmp_path)

    assert processors == ",".join(map(str, PROCESSORS))
    assert said == (
        f"not bound: its {len(PROCESSORS)} threads (OMP_NUM_THREADS) are more than the processors of a node"
    )
    assert workers(1, folders, tmp_path, OMP_NUM_THREADS="1") == [(HALVES[0], "node 0")]


@pytest.mark.long
def test_a_worker_is_bound_to_the_node_of_its_gpus(tmp_path: Path) -> None:
    folders = {**nodes(tmp_path, *HALVES), **gpus(tmp_path, 0, 1, 1)}
    everywhere = ",".join(map(str, PROCESSORS))
    of_none = "not bound: its GPUs are not of one node; CUDA_VISIBLE_DEVICES gives a process its own, by their numbers"

    assert workers(1, folders, tmp_path, CUDA_VISIBLE_DEVICES="1,2") == [(HALVES[1], "node 1")]
    assert workers(1, folders, tmp_path) == [(everywhere, of_none)]
    assert workers(1, folders, tmp_path, CUDA_VISIBLE_DEVICES="GPU-8c5d") == [(everywhere, of_none)]
    assert workers(1, folders, tmp_path, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1") == [(HALVES[0], "node 0")]


@pytest.mark.long
def test_on_a_host_with_one_node_its_number_is_told(tmp_path: Path) -> None:
    folders = nodes(tmp_path, ",".join(map(str, PROCESSORS)))

    assert [said for _, said in workers(1, folders, tmp_path)] == ["node 0"]


def test_where_nodes_are_not_known_workers_run_unbound_and_say_why(tmp_path: Path) -> None:
    ((processors, said),) = workers(1, nodes(tmp_path), tmp_path)

    assert processors == ",".join(map(str, PROCESSORS))
    assert said == "not bound: /sys/devices/system/node names no processors"


@pytest.mark.long
def test_where_the_lock_of_places_cannot_be_made_workers_run_unbound_and_say_why(tmp_path: Path) -> None:
    locks = tmp_path / f"penstock-locks-{os.getuid()}"
    locks.mkdir(mode=0o700)
    (locks / "numa.lock").mkdir()

    assert {
        said.partition(" /")[0] for _, said in workers(1, nodes(tmp_path, *HALVES), tmp_path, OMP_NUM_THREADS="1")
    } == {"not bound: expected"}
