"""A torch policy behind the clients of others: what it samples trains as it was sampled: `make test-agents`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from tests.agents_real.talking import TALKS, Talks
from tests.models_hf.chat_templates import QWEN
from tests.stages.agents.random_agents import Thinks, chat_that_thinks, liked_by

from penstock import SourceEnv
from penstock.policies import SamplingParams
from penstock.testing import drive, drive_source
from penstock.torch import TorchPolicy, TorchReference


async def test_what_a_torch_policy_samples_for_each_client_trains_once_as_a_forward_pass_has_it(tmp_path: Path) -> None:
    chat = chat_that_thinks(tmp_path, QWEN)
    model = partial(Thinks, liked_by(chat))
    policy = TorchPolicy(model, chat.tokenizer.eos_id)
    sampling = SamplingParams(max_completion_tokens=16)
    env = SourceEnv(
        Talks,
        policy,
        chat=chat,
        group_size=2,
        groups=len(TALKS),
        max_length=512,
        sampling=sampling,
        rollout_timeout_s=60,
    )

    sampled = await drive_source(env)
    groups = await drive(TorchReference(model), sampled)

    assert sampled.ledger.balance().reasons["failed"] == {}
    assert [group.rollouts for group in groups] == [2] * len(TALKS)
    for group in groups:
        assert group.behavior_logprobs is not None
        assert group.ref_logprobs is not None
        np.testing.assert_allclose(group.ref_logprobs, group.behavior_logprobs, atol=1e-5)
    metrics = sampled.metrics.emit(0)
    trained = sum(int(group.loss_mask.sum()) for group in groups)
    dropped = sum(value for name, value in metrics.items() if name.startswith("rollout/dropped_tokens/"))
    assert trained + dropped == metrics["rollout/tokens"]
    assert trained > 16 * len(TALKS)
