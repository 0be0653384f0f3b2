"""SkyRL's own trainers train what an unchanged environment of Atropos sends, all of it as it was sent."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.atropos.gateways import process
from tests.atropos_real.processes import ROOT
from tests.atropos_real.trained import sent_sequences
from tests.atropos_skyrl_real.conftest import MakeTrainer
from tests.atropos_skyrl_real.pair import OPTIONS, PATH, SEQUENCES, Settings, Trained, environments, write_prompts
from tests.failsafe import FAILSAFE_S
from tests.pages import program
from tests.ports import free_port
from tests.skyrl_real.training import FULLY_ASYNC
from tests.skyrl_real.training import OPTIONS as SMALL

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


@pytest.mark.timeout(1800)
def test_the_commands_of_the_page_train_through_ray(
    settings: Callable[..., Settings], policy: Path, tmp_path: Path
) -> None:
    """SkyRL simulates its optimizer steps here, for its workers need GPUs; everything else is its own.

    The simulated trainer of 0.4.0 fails behind its last step, for its dispatch has no `finalize_pending_saves`.
    """
    port = str(free_port())
    page = ROOT / "docs" / "atropos-skyrl.md"
    (tmp_path / "my_run.py").write_text(program(page).replace("8000", port))
    (tmp_path / "flash_attn").mkdir()  # imported with its workers, which this run does not make; it is for GPUs
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (tmp_path / "flash_attn" / "bert_padding.py").write_text("pad_input = unpad_input = None\n")
    (waits,) = re.findall(r"^until curl .*$", page.read_text(), re.MULTILINE)
    log = tmp_path / "command.log"
    with (
        log.open("w") as written,
        subprocess.Popen(
            [sys.executable, "-m", "skyrl.train.entrypoints.main_base", *arguments(policy, tmp_path)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{PATH}", "SKYRL_DUMP_INFRA_LOG_TO_STDOUT": "1"},
            stdout=written,
            stderr=subprocess.STDOUT,
        ) as command,
    ):
        try:
            subprocess.run(["/bin/bash", "-c", waits.replace("8000", port)], timeout=3 * FAILSAFE_S, check=True)
            settings().start(f"http://127.0.0.1:{port}")
            command.wait(timeout=3 * FAILSAFE_S)
        finally:
            command.terminate()

    output = log.read_text()
    assert re.search(r"run_ended .*'trained': 48,", output), output
    assert "'_SimDispatch' object has no attribute 'finalize_pending_saves'" in output


def arguments(policy: Path, folder: Path) -> list[str]:
    """Return those of the page's command, and what makes it small."""
    data = write_prompts(folder / "prompts.jsonl")
    simulated = {
        "trainer.fully_async.simulate_training": True,
        "trainer.fully_async.simulate_training_step_seconds": 0.01,
        "trainer.max_training_steps": STEPS,
    }
    paths = {"trainer.policy.model.path": policy, "data.train_data": [str(data)], "trainer.log_path": folder / "logs"}
    paths |= {"trainer.export_path": folder / "exports", "trainer.ckpt_path": folder / "checkpoints"}
    named = {
        "trainer.override_entrypoint": "penstock.integrations.skyrl",
        "penstock.generator": "my_run:generator",
    }
    options = SMALL | OPTIONS | FULLY_ASYNC | simulated | paths | named
    return [f"{name}={'null' if value is None else value}" for name, value in options.items()]
