from __future__ import annotations

import time

import pytest
import torch

from penstock._stages.training.step_clock import StepClock


def test_laps_of_one_name_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 11.0, 13.0, 13.5, 17.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    clock = StepClock(torch.device("cpu"))

    for part in ("forward", "backward", "forward", "backward"):
        clock.lap(part)

    assert clock.seconds() == {"timing_s/forward": 1.5, "timing_s/backward": 6.0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_device_a_lap_is_the_time_of_the_device_not_of_the_host() -> None:
    device = torch.device("cuda")
    large = torch.ones(4096, 4096, device=device)
    torch.cuda.synchronize()
    clock = StepClock(device)

    for _ in range(50):
        torch.matmul(large, large)
    clock.lap("products")
    clock.lap("nothing")

    seconds = clock.seconds()
    assert seconds["timing_s/products"] > 100 * seconds["timing_s/nothing"]
