from __future__ import annotations

from tests.pipeline.flow_stages import Collect, DropOdd, Groups, Pack, Train

from penstock import processes, ray, source


def test_a_pipeline_is_drawn_from_top_to_bottom() -> None:
    pipeline = (
        source(Groups(1), on=processes(4))
        .then(DropOdd(), capacity=8, capacity_bytes=3 * 2**19)
        .then(Pack(), capacity=1)
        .sink(Train(), capacity_bytes=1000)
    )

    assert pipeline.describe().splitlines() == [
        "Groups   4 processes, at most 1 restart an hour each",
        "  │ shm: 8 records and 1.5 MiB for each process",
        "DropOdd  here",
        "  │ memory: 1 record",
        "Pack     here",
        "  │ memory: 2 records, 1000 B",
        "Train    here",
    ]


def test_an_edge_of_actors_has_both_transports() -> None:
    described = source(Groups(1), on=ray(workers=2)).then(DropOdd()).sink(Collect()).describe()

    assert described.splitlines()[1] == "  │ shm on this host, tcp elsewhere: 64 records and 64 MiB for each process"


def test_a_fragment_in_processes_is_one_stage() -> None:
    fragment = source(Groups(1)).then(DropOdd())

    described = source(fragment, on=processes(2, restarts=0)).sink(Collect()).describe()

    assert described.startswith("Groups → DropOdd  2 processes, no restarts\n")
