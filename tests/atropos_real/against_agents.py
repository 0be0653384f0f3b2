"""ManagedServer of Atropos as the client of an agent: `make test-atropos` runs this file."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import pytest
from tests.agents_real.calculator import run
from tests.stages.agents.served import chat_format

from penstock.agents import AgentClient
from penstock.chat import ChatFormat

managed: Any = import_module("atroposlib.envs.server_handling.managed_server")
vllm_server: Any = import_module("atroposlib.envs.server_handling.vllm_server")
baseline: Any = import_module("atroposlib.envs.server_handling.server_baseline")


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return chat_format(tmp_path)


async def test_its_nodes_are_the_sequences_that_train(chat: ChatFormat, tmp_path: Path) -> None:
    states: list[Any] = []

    class Manages:
        """Asks for two conversations of one turn each."""

        async def drive(self, _: int, client: AgentClient) -> float:
            folder = str(tmp_path / "tokenizer")
            config = baseline.APIServerConfig(
                model_name=folder,
                tokenizer_name=folder,
                base_url=client.base_url,
                api_key=client.api_key,
                health_check=False,
            )
            inner = await anyio.to_thread.run_sync(vllm_server.VLLMServer, config)  # it reads the tokenizer
            server = managed.ManagedServer(inner)
            for text in ("one?", "two?"):
                said = [{"role": "user", "content": text}]
                answer = await server.chat_completion(messages=said, n=1, max_tokens=64, temperature=1.0)
                assert answer.choices[0].message.content.endswith("Hello.")
            states.extend(server.get_state()["nodes"])
            await inner.openai.close()
            return 1.0

    ran = await run(Manages, chat)

    ran.trains_once(sequences=2)
    nodes = {tuple(node.tokens): node for node in states}
    assert len(nodes) == len(ran.group)
    for row in ran.group:
        node = nodes[tuple(row.tokens.tolist())]
        assert row.loss_mask.tolist() == [token != -100 for token in node.masked_tokens]
        assert row.behavior_logprobs is not None
        found = np.array(node.logprobs)[row.loss_mask]
        np.testing.assert_allclose(row.behavior_logprobs[row.loss_mask], found, atol=1e-6)
