from __future__ import annotations

import pytest

from penstock import here, joining, processes, ray
from penstock.errors import InvalidConfig


def test_a_placement_reads_like_a_sentence() -> None:
    assert str(here()) == "here"
    assert str(processes(1, restarts=0)) == "1 process, no restarts"
    assert str(processes(4)) == "4 processes, at most 1 restart an hour each"
    assert str(processes(4, restarts=3)) == "4 processes, at most 3 restarts an hour each"
    assert str(ray(workers=1)) == "1 actor of Ray, SPREAD, each reserves 1 CPU, at most 1 restart an hour each"
    assert (
        str(ray(4, num_cpus=0, num_gpus=0.5, resources={"slot": 2}, strategy="PACK", restarts=0))
        == "4 actors of Ray, PACK, each reserves 0.5 GPU, 2 slot, no restarts"
    )
    assert str(joining(expected=4)) == "workers that join at tcp://0.0.0.0:5555, 4 expected"


@pytest.mark.parametrize(("count", "options"), [(0, {}), (1, {"restarts": -1}), (1, {"stop_timeout_s": -0.1})])
def test_impossible_numbers_are_refused(count: int, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"Processes\.(count|restarts|stop_timeout_s): expected a"):
        processes(count, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_worker_needs_time_to_start(seconds: float) -> None:
    with pytest.raises(ValueError, match="start_timeout_s: expected a finite number above 0"):
        processes(1, start_timeout_s=seconds)


def test_an_address_of_ray_client_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="address: expected auto, local or HOST:PORT, got 'ray://head:10001'"):
        ray(workers=1, address="ray://head:10001")


def test_workers_can_join_over_tcp_alone() -> None:
    with pytest.raises(InvalidConfig, match="url: expected tcp://HOST:PORT, got 'shm://'"):
        joining(expected=1, url="shm://")


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="strategy: expected one of PACK, SPREAD, got 'EVEN'"):
        ray(workers=1, strategy="EVEN")  # type: ignore[arg-type]
