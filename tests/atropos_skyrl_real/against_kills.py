"""An environment, a gateway or a trainer that is killed: numbers balance, training goes on, and nothing hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from tests.atropos.gateways import process
from tests.atropos_skyrl_real.against_pair import BOTH, assert_trained_once, exits, train
from tests.atropos_skyrl_real.conftest import MakeTrainer
from tests.atropos_skyrl_real.killed import LAST
from tests.atropos_skyrl_real.pair import OPTIONS, PATH, SEQUENCES, Settings, Trained, environments, write_prompts
from tests.failsafe import FAILSAFE_S
from tests.skyrl_real.against_skyrl import committed_in

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default:`device` is deprecated:FutureWarning"),
]

STEPS = 5


def kill(process: subprocess.Popen[Any]) -> None:
    process.kill()
    assert process.wait(timeout=FAILSAFE_S) == -signal.SIGKILL


@BOTH
def test_an_environment_that_is_killed_costs_no_step_once_another_is_there(
    settings: Callable[..., Settings], make_trainer: MakeTrainer, options: dict[str, Any]
) -> None:
    said = settings()
    trainer = make_trainer(**options, **{"trainer.max_training_steps": STEPS})
    trained = Trained().of(trainer)

    def replace(step: int) -> None:
        if step == 2:
            kill(environments[0].process)
            said.start(url_of(environments[0].process.args))

    trainer.dispatch.at_step = replace
    train(trainer)

    assert exits() == 0, environments[-1].log.read_text()[-4000:]
    assert_trained_once(trainer, trained, STEPS)


def url_of(command: Any) -> str:
    """Return the gateway of an environment, from its command."""
    return str(command[command.index("--env.rollout_server_url") + 1])


@BOTH
def test_a_gateway_that_is_killed_costs_no_step_once_it_is_back(
    settings: Callable[..., Settings], make_trainer: MakeTrainer, options: dict[str, Any]
) -> None:
    with ExitStack() as stack:
        first, url = stack.enter_context(process(PYTHONPATH=PATH))
        said = settings(gateway=url)
        said.start(url)
        trainer = make_trainer(**options, **{"trainer.max_training_steps": STEPS})
        trained = Trained().of(trainer)

        def replace(step: int) -> None:
            if step == 2:
                kill(first)
                stack.enter_context(process("--port", str(urlsplit(url).port), PYTHONPATH=PATH))
                kill(environments[0].process)  # it would end by itself, for the new gateway does not know it
                said.start(url)

        trainer.dispatch.at_step = replace
        train(trainer)

    assert_trained_once(trainer, trained, STEPS)


@BOTH
@pytest.mark.parametrize("apart", [False, True], ids=["gateway_in_it", "gateway_apart"])
def test_a_trainer_that_is_killed_resumes_without_training_a_sequence_twice(
    settings: Callable[..., Settings],
    make_trainer: MakeTrainer,
    policy: Path,
    options: dict[str, Any],
    apart: bool,  # noqa: FBT001
) -> None:
    resuming = options | {"trainer.ckpt_interval": 1, "trainer.resume_mode": "latest"}
    resuming["trainer.max_training_steps"] = STEPS + 1
    with process(PYTHONPATH=PATH) as (_, url):
        said = settings(gateway=url if apart else "")
        folder = Path(said.folder)
        if apart:
            said.start(url)
        steps = run_and_kill(policy, folder, OPTIONS | resuming)
        if not apart:
            (pid,) = steps[-1]["environments"]
            psutil.Process(pid).wait(timeout=FAILSAFE_S)  # it ends by itself: its gateway is gone
        before = committed_in(folder / "checkpoints")

        resumed = make_trainer(**resuming)
        train(resumed)

        if not apart:
            assert exits() == 0, environments[-1].log.read_text()[-4000:]
    after = committed_in(folder / "checkpoints")
    assert sum(mask.bit_count() for mask in before.values()) == (LAST - 1) * SEQUENCES
    assert sum(mask.bit_count() for mask in after.values()) == (STEPS + 1) * SEQUENCES
    balance = resumed.generator.report.balance
    assert balance.ended["trained"] == (STEPS + 1 - (LAST - 1)) * SEQUENCES
    assert balance.balanced
    assert balance.in_flight == 0


def run_and_kill(policy: Path, folder: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train in a process of its own, kill that in its last step, and return what it printed."""
    data = write_prompts(folder / "prompts.jsonl")
    arguments = [*map(str, (policy, data, folder)), json.dumps(options)]
    log = folder / "killed.log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "tests.atropos_skyrl_real.killed", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": PATH},
        ) as running,
    ):
        try:
            assert running.stdout is not None
            printed = (line for line in running.stdout if line.startswith('{"step"'))
            steps = [json.loads(line) for line in islice(printed, LAST)]
        finally:
            running.kill()
    assert len(steps) == LAST, log.read_text()[-4000:]
    return steps
