"""The agents of docs/bring-your-agent.md: `make test-agents` runs this file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.agents_real.against_smolagents import call
from tests.agents_real.calculator import NUMBER, calculate, run
from tests.pages import program

from penstock.agents import AgentEnv
from penstock.chat import ChatFormat

PAGE = Path(__file__).parent.parent.parent / "docs" / "bring-your-agent.md"


NAMES = re.findall(r"^(?:async )?def (\w+)\(row, client\)", program(PAGE), re.MULTILINE)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Import the page as a module, which processes of its agents find too."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "brought.py").write_text(program(PAGE))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield import_module("brought")


def answer(prompt: str) -> str:
    """Call `add`, if there are tools; else say the sum at once."""
    if "# Tools" in prompt:
        return calculate(prompt)
    return f"It is {sum(map(int, NUMBER.findall(prompt)))}."


@pytest.mark.parametrize("name", NAMES)
async def test_an_agent_of_the_page_has_its_reward(name: str, page: Any, chat: ChatFormat) -> None:
    smol = name == "with_smolagents"

    ran = await run(AgentEnv(getattr(page, name), page.rows), chat, call if smol else answer)

    ran.trains_once(sequences=2 if smol else 1)
