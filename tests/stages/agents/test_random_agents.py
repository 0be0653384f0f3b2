"""Whatever an agent does, each token that was sampled for it trains once, as it was sampled, or is counted."""

from __future__ import annotations

import gc
import itertools
import resource
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import numpy as np
import pytest
from tests.stages.agents.random_agents import CONTEXT, TEMPLATES, RandomAgent, Thinks, chat_that_thinks, liked_by

from penstock import SourceEnv, TrajectoryGroup
from penstock.chat import ChatFormat
from penstock.policies import SamplingParams
from penstock.testing import Driven, drive, drive_source
from penstock.torch import TorchPolicy, TorchReference

GROUP = 4


async def check_agents(chat: ChatFormat, groups: int, seed: int) -> Counter[str]:
    """Run random agents, check the account of their tokens, and return the metrics that are totals."""
    model = partial(Thinks, liked_by(chat))
    session, strays = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)), anyio.create_task_group()
    agent = RandomAgent(strays, session, seed)
    source = SourceEnv(
        lambda: agent,
        TorchPolicy(model, chat.tokenizer.eos_id),
        chat=chat,
        group_size=GROUP,
        groups=groups,
        sampling=SamplingParams(max_completion_tokens=12),
        max_length=CONTEXT,
        seed=seed,
    )
    ran: list[Driven[TrajectoryGroup]] = []
    async with session, strays:
        ran.append(await drive_source(source))
    (sampled,) = ran
    referred = await drive(TorchReference(model), sampled)
    metrics = sampled.metrics.emit(0)
    check_sums(list(referred), metrics, agent)
    for group in referred:
        check_logprobs(group)
    return Counter({name: int(value) for name, value in metrics.items() if "dropped" in name or "branched" in name})


def check_sums(groups: list[TrajectoryGroup], metrics: dict[str, Any], agent: RandomAgent) -> None:
    trained = sum(int(group.loss_mask.sum()) for group in groups)
    dropped = sum(value for name, value in metrics.items() if name.startswith("rollout/dropped_tokens/"))
    assert metrics["rollout/tokens"] == trained + dropped
    seen = Counter(token for tokens in agent.seen.values() for token in tokens)
    assert not seen - Counter(token for group in groups for token in group.tokens[group.loss_mask].tolist())


def check_logprobs(group: TrajectoryGroup) -> None:
    """Check them against a forward pass, which is of the tokens that each was sampled behind."""
    assert group.ref_logprobs is not None
    assert group.behavior_logprobs is not None
    np.testing.assert_allclose(group.ref_logprobs, group.behavior_logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("template", "history"), list(zip(TEMPLATES, ["keep", "keep", "template", "keep"], strict=True))
)
def test_each_token_of_any_agent_trains_once_as_it_was_sampled_or_is_dropped(
    template: str, history: Any, tmp_path: Path
) -> None:
    anyio.run(check_agents, chat_that_thinks(tmp_path, TEMPLATES[template], history=history), 2, 0)


@pytest.mark.long
def test_ten_thousand_agents_keep_an_exact_account_in_constant_memory(tmp_path: Path) -> None:
    formats = []
    for number, (template, history) in enumerate(itertools.product(TEMPLATES.values(), ["keep", "template"])):
        (folder := tmp_path / str(number)).mkdir()
        formats.append(chat_that_thinks(folder, template, history=history))
    ends: Counter[str] = Counter()
    megabytes = []
    for seed in range(40):
        ends += anyio.run(check_agents, formats[seed % len(formats)], 63, seed)
        gc.collect()
        megabytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20)

    assert {name.rpartition("/")[2] for name in ends} >= {
        *("cancelled", "failed", "filtered"),
        *("edited", "compacted", "template", "parallel"),
    }
    assert megabytes[-1] - megabytes[15] < 64
