"""Environments of Atropos, in processes of their own, served to AtroposGateway: what is trained is what they sent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.atropos_real.processes import serve
from tests.atropos_real.trained import Recorder, gateway_for, sent_sequences, train_on

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True, slots=True)
class Case:
    """An environment, and what it needs."""

    script: str
    server_type: str = "vllm"
    own_advantages: bool = False


CASES = {
    "RegexEnv": Case("community/regex_generation/regex_env.py"),
    "Blackjack": Case("game_environments/gymnasium/blackjack/blackjack_env_no_thinking.py", "openai"),
    "GSM8k": Case("gsm8k_server.py"),
    "SingleToolCallingEnv": Case("tool_calling_server.py"),
    "MultiTurnToolCallingEnv": Case("tool_use_multiturn_server.py", "openai"),
    "MultiTurnToolUseTurnLevelAdvantageEnv": Case(
        "tool_use_turnlevel_advantage_server.py", "openai", own_advantages=True
    ),
    "InterleavedInlineEnv": Case("tool_use_interleaved_thinking.py", "openai"),
}


@pytest.mark.parametrize("name", CASES)
async def test_what_an_environment_sends_is_trained_once_and_unchanged(
    name: str, checkout: Path, workspace: Path, model: str, tmp_path: Path
) -> None:
    case = CASES[name]
    script = checkout / "environments" / case.script
    trainer = Recorder(own_advantages=case.own_advantages)
    options = ("--env.max_token_length", "8192")

    environment = await train_on(
        gateway_for(),
        trainer,
        lambda url: serve(script, url, model, workspace, *options, folder=tmp_path, server_type=case.server_type),
    )

    sent = sent_sequences(environment.sent())
    assert trainer.sequences
    assert set(sent.values()) == {1}, "the model says nothing twice"
    assert not trainer.sequences - sent
