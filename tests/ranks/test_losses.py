"""Two ranks train with every loss as a single process does; they run `script_of_losses`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.ranks.script_of_losses import KINDS, LOSSES, STEPS

from penstock import losses
from penstock.losses import ImportanceWeight, Loss, Mask, Term


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    subprocess.run([sys.executable, "-m", "tests.ranks.script_of_losses", str(folder)], check=True, timeout=600)
    return folder


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        pytest.param(f"{kind}-{number}", loss, id=f"{kind}-{loss!r}")
        for kind, of_kind in KINDS.items()
        for number, loss in enumerate(of_kind)
    ],
)
def test_ranks_train_with_a_loss_as_a_single_process_does(name: str, loss: Loss, folder: Path) -> None:
    found = json.loads((folder / f"{name}.json").read_text())

    assert len(found["steps"]) == STEPS, loss
    for alone, ranked in found["steps"]:
        assert ranked == pytest.approx(alone, rel=1e-5, abs=1e-5)
    alone, ranked = found["weights"]
    for name_of, tensor in alone.items():
        np.testing.assert_allclose(ranked[name_of], tensor, atol=1e-5)


def test_every_term_mask_and_weight_is_among_the_losses() -> None:
    kinds = (Term, Mask, ImportanceWeight)
    public = {
        name for name in losses.__all__ if isinstance(kind := getattr(losses, name), type) and issubclass(kind, kinds)
    }

    told = " ".join(map(repr, LOSSES))
    assert {name for name in public - {"Term", "Mask"} if f"{name}(" not in told} == set()
