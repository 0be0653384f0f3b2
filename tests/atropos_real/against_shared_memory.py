"""Environments of Atropos with `ShmTransport`: what is trained is what they sent, and none of it went over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.atropos_real.processes import ROOT, Environment, run, serve
from tests.atropos_real.trained import Recorder, gateway_for, sent_sequences, train_on

pytestmark = pytest.mark.timeout(600)

EXAMPLES = ROOT / "examples/atropos"
REGEX = Path("environments/community/regex_generation")


def assert_trained_as_sent(trainer: Recorder, environment: Environment) -> None:
    assert trainer.sequences
    assert not trainer.sequences - sent_sequences(environment.sent())
    assert "over_http" not in environment.log.read_text()


async def test_an_environment_with_the_class_before_its_own_sends_through_shared_memory(
    checkout: Path, workspace: Path, model: str, tmp_path: Path
) -> None:
    script, trainer, path = EXAMPLES / "shared_memory.py", Recorder(), checkout / REGEX
    options = ("--env.max_token_length", "8192")

    environment = await train_on(
        gateway_for(),
        trainer,
        lambda url: serve(script, url, model, workspace, *options, folder=tmp_path, path=path),
    )

    assert_trained_as_sent(trainer, environment)


async def test_an_environment_that_is_attached_sends_through_shared_memory(
    checkout: Path, workspace: Path, model: str, tmp_path: Path
) -> None:
    script, trainer, path = EXAMPLES / "shared_memory_attached.py", Recorder(), checkout / REGEX
    given = (f"{model}/v1", str(workspace / "tokenizer"), str(tmp_path / "groups.jsonl"))

    environment = await train_on(
        gateway_for(),
        trainer,
        lambda url: run([str(script), url, *given], cwd=workspace, folder=tmp_path, path=path),
    )

    assert_trained_as_sent(trainer, environment)
