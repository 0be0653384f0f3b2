"""A newer release is compared by changing a pin; what it lacks is named. `make test-oracles` runs this file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.oracles_real import of_areal, of_openrlhf, of_skyrl, of_trl, of_verl
from tests.oracles_real.release import Release

ROOT = Path(__file__).parent.parent.parent

RELEASES = [of_verl.VERL, of_skyrl.SKYRL, of_trl.TRL, of_openrlhf.OPENRLHF, of_areal.AREAL]


@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_the_release_is_the_pinned_one(release: Release) -> None:
    package, _, version = str(release).rpartition("-")
    pins = (ROOT / "scripts" / "oracles" / "requirements.txt").read_text().splitlines()

    assert f"{package}=={version}" in pins


@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_a_missing_function_fails_with_its_name_and_that_of_the_release(release: Release) -> None:
    package = str(release).rpartition("-")[0]

    with pytest.raises(pytest.fail.Exception, match=rf"{release}: expected {package}\.gone\.loss, got none"):
        release.get(f"{package}.gone", "loss")
    with pytest.raises(pytest.fail.Exception, match=rf"{release}: expected {package}\.gone, got none"):
        release.get(package, "gone")


WRITTEN = {
    "peer/maths.py": """
import nowhere
import torch
from .parts import FACTOR, double as twice
from .stars import *

@register_loss("half")
@torch.no_grad()
def half(x: nowhere.Tensor, by: float = FACTOR) -> nowhere.Tensor:
    return shift(twice(x)) / by

def lost(x):
    return nowhere.lost(x)

class Loss:
    kind = HALF = half
    def __call__(self, x):
        return self.kind.__func__(x)
""",
    "peer/parts.py": "FACTOR = 2 * 2\ndef double(x): return len([x, x]) * x\n",
    "peer/stars.py": "def shift(x): return x + 1\n",
}


def test_a_function_runs_with_what_it_uses_and_without_packages_that_it_does_not(tmp_path: Path) -> None:
    for name, text in WRITTEN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    written = Release("peer-1.0", tmp_path)

    half = written.get("peer.maths", "half")

    assert half(torch.ones(2)).tolist() == [0.75, 0.75]
    assert written.get("peer.maths", "Loss").HALF is half
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        written.get("peer.maths", "lost")(1)
