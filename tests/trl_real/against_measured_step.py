"""TRL's step in `python -m benchmarks.gpu`, on a CPU, with models that take no time."""

from __future__ import annotations

import pytest
from benchmarks.gpu.cases import CASES, Load
from benchmarks.gpu.devices import Device
from benchmarks.gpu.peer import measure_trl

SMALL = Load(256, shortest=8, longest=16, repeats=2)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("case", ["tiny", "tiny-adapters"])
def test_trl_trains_on_the_sequences_of_penstocks_step(case: str) -> None:
    found = measure_trl(CASES[case], SMALL, Device.of("cpu"))

    assert found["tokens"] == SMALL.batch(CASES[case]).tokens.size
    assert len(found["step_s"]) == SMALL.repeats
    assert found["tokens_per_s"] > 0
    assert found["sequences"] == 8
