"""SkyRL's own trainers train what an unchanged environment of Atropos sends, all of it as it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.atropos.gateways import process
from tests.atropos_real.trained import sent_sequences
from tests.atropos_skyrl.conftest import MakeTrainer
from tests.atropos_skyrl.pair import PATH, SEQUENCES, Settings, Trained, environments
from tests.failsafe import FAILSAFE_S
from tests.skyrl_real.training import FULLY_ASYNC

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default:`device` is deprecated:FutureWarning"),
]

STEPS = 3
SHARED_MEMORY = str(Path(__file__).with_name("shared_memory.py"))

BOTH = pytest.mark.parametrize("options", [{}, FULLY_ASYNC], ids=["synchronous", "fully_async"])


def train(trainer: Any) -> list[dict[str, float]]:
    """Train, and return what SkyRL has logged, by step."""
    logged: dict[int, dict[str, float]] = {}
    trainer.tracker.log = lambda found, step, **_: logged.setdefault(step, {}).update(found)
    asyncio.run(trainer.train())
    return [logged[step] for step in sorted(logged)]


def assert_trained_once(trainer: Any, trained: Trained, steps: int = STEPS) -> None:
    balance = trainer.generator.report.balance
    assert sum(trained.rows.values()) == balance.ended["trained"] == steps * SEQUENCES
    assert set(trained.rows.values()) == {1}, "the model says nothing twice"
    assert balance.balanced
    assert balance.in_flight == 0


def assert_trained_as_sent(trainer: Any, trained: Trained) -> None:
    assert_trained_once(trainer, trained)
    assert not trained.rows - sent_sequences(group for each in environments for group in each.sent())


def exits(number: int = -1) -> int:
    """Wait for an environment, and return its status."""
    return environments[number].process.wait(timeout=FAILSAFE_S)


@BOTH
@pytest.mark.parametrize("script", ["gsm8k_server.py", SHARED_MEMORY], ids=["http", "shared_memory"])
def test_an_unchanged_environment_feeds_skyrls_trainer_without_an_engine(
    settings: Callable[..., Settings], make_trainer: MakeTrainer, script: str, options: dict[str, Any]
) -> None:
    settings(script=script)
    trainer = make_trainer(**options, **{"trainer.max_training_steps": STEPS})
    trained = Trained().of(trainer)

    logged = train(trainer)

    assert len(logged) == STEPS
    assert exits() == 0, environments[-1].log.read_text()[-4000:]
    assert_trained_as_sent(trainer, trained)
    assert "over_http" not in environments[-1].log.read_text()
    assert not list(Path(trainer.cfg.trainer.export_path).glob("penstock_weights*"))


@BOTH
def test_an_environment_feeds_it_through_a_gateway_of_its_own(
    settings: Callable[..., Settings], make_trainer: MakeTrainer, options: dict[str, Any]
) -> None:
    with process(PYTHONPATH=PATH) as (_, url):
        settings(gateway=url).start(url)
        trainer = make_trainer(**options, **{"trainer.max_training_steps": STEPS})
        trained = Trained().of(trainer)

        train(trainer)

        environments[-1].stop()  # as with Atropos' own server, its `total_steps` would end it
    assert_trained_as_sent(trainer, trained)
