from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from tests.tiny_model import TinyModel

from penstock.schemas import TrajectoryGroup
from penstock.stages.torch_reference import TorchReference
from penstock.testing import drive, group

VOCABULARY = 11


def made(seed: int, lengths: list[int]) -> TrajectoryGroup:
    built = group(instance_id=str(seed), completion_lengths=lengths, seed=seed)
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, len(built.tokens))
    return group(instance_id=str(seed), completion_lengths=lengths, tokens=tokens)


@torch.no_grad()
def one_by_one(model: TinyModel, given: TrajectoryGroup) -> list[float]:
    """The log-probability of every token that trains, 0 of others, each sequence by itself."""
    found: list[float] = []
    for row in given:
        tokens = torch.from_numpy(row.tokens.copy()).long()[None]
        length = tokens.shape[1]
        attend = torch.ones(1, length, length, dtype=torch.bool).tril()
        logits = model(tokens, positions=torch.arange(length)[None], attend=attend)[0]
        for t, trains in enumerate(row.loss_mask.tolist()):
            found.append(torch.log_softmax(logits[t - 1], -1)[tokens[0, t]].item() if trains else 0.0)
    return found


@pytest.mark.parametrize("micro_batch_tokens", [1, 16, 16_384])
async def test_every_token_that_trains_is_scored_as_if_its_sequence_were_alone(micro_batch_tokens: int) -> None:
    groups = [made(0, [9, 2, 3]), made(1, [1, 5])]

    out = await drive(TorchReference(partial(TinyModel, vocabulary=VOCABULARY), micro_batch_tokens), groups)

    for before, after in zip(groups, out, strict=True):
        assert after.ref_logprobs is not None
        assert after.ref_logprobs.tolist() == pytest.approx(
            one_by_one(TinyModel(vocabulary=VOCABULARY), before), abs=1e-5
        )
        assert not after.ref_logprobs.flags.writeable


async def test_what_came_with_the_data_is_kept() -> None:
    given = group(completion_lengths=[2], prompt_length=1, ref_logprobs=[0, -1, -2])

    out = await drive(TorchReference(partial(TinyModel, vocabulary=VOCABULARY)), [given, made(1, [3])])

    assert out[0].ref_logprobs is not None
    assert out[0].ref_logprobs.tolist() == [0, -1, -2]
    assert out[1].ref_logprobs is not None
