"""The format of chats of the policy, and clients that ask nobody else: `make test-agents`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.stages.agents.served import chat_format

from penstock.chat import ChatFormat

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks a host for the prices of models
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["LANGSMITH_TRACING"] = "false"


@pytest.fixture(autouse=True, scope="session")
def _nothing_blocks_the_event_loop() -> None:
    """Override the rule: the clients of others read files while an event loop runs."""


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return chat_format(tmp_path)
