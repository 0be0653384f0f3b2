from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.tiny_model import TinyModel
from torch import Tensor

from penstock import TrajectoryGroup
from penstock.errors import InvalidRecord
from penstock.testing import drive, group
from penstock.torch import Attention, KVCache, TorchReference

VOCABULARY = 11


def made(seed: int, lengths: list[int]) -> TrajectoryGroup:
    built = group(instance_id=str(seed), completion_lengths=lengths, seed=seed)
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, len(built.tokens))
    return group(instance_id=str(seed), completion_lengths=lengths, tokens=tokens)


@torch.no_grad()
def one_by_one(model: TinyModel, given: TrajectoryGroup, temperature: float = 1.0) -> list[float]:
    """Return the log-probability of every trained token, 0 for others, each sequence by itself."""
    found: list[float] = []
    for row in given:
        tokens = torch.from_numpy(row.tokens.copy()).long()[None]
        length = tokens.shape[1]
        attend = Attention.packed(torch.zeros(1, length, dtype=torch.int64))
        logits = model(tokens, positions=torch.arange(length)[None], attend=attend)[0]
        for t, trains in enumerate(row.loss_mask.tolist()):
            found.append(torch.log_softmax(logits[t - 1] / temperature, -1)[tokens[0, t]].item() if trains else 0.0)
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


async def test_at_the_temperature_at_which_the_policy_samples() -> None:
    given = made(0, [9, 2, 3])

    (out,) = await drive(TorchReference(partial(TinyModel, vocabulary=VOCABULARY), temperature=0.5), [given])

    assert out.ref_logprobs is not None
    expected = one_by_one(TinyModel(vocabulary=VOCABULARY), given, temperature=0.5)
    assert out.ref_logprobs.tolist() == pytest.approx(expected, abs=1e-5)


async def test_groups_that_were_sampled_at_another_temperature_are_refused() -> None:
    given = group(instance_id="7", completion_lengths=[2], meta={"temperature": 0.7})

    with pytest.raises(InvalidRecord, match=r"/7: temperature: expected 1.0, which this TorchReference was .* got 0.7"):
        await drive(TorchReference(partial(TinyModel, vocabulary=VOCABULARY)), [given])


class Forgetful(TinyModel):
    """Drops everything out while it trains."""

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: KVCache | None = None) -> Tensor:
        logits = super().forward(tokens, positions=positions, attend=attend, cache=cache)
        return torch.nn.functional.dropout(logits, 1.0, training=self.training)


async def test_the_reference_does_not_train() -> None:
    given = made(0, [9, 2, 3])

    (out,) = await drive(TorchReference(partial(Forgetful, vocabulary=VOCABULARY)), [given])

    assert out.ref_logprobs is not None
    assert out.ref_logprobs.tolist() == pytest.approx(one_by_one(TinyModel(vocabulary=VOCABULARY), given), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature: expected a finite number above 0, got 0.0"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens: expected a whole number of at least 1, got 0"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchReference(TinyModel, **options)


async def test_given_reference_logprobs_are_kept() -> None:
    given = group(completion_lengths=[2], prompt_length=1, ref_logprobs=[0, -1, -2])

    out = await drive(TorchReference(partial(TinyModel, vocabulary=VOCABULARY)), [given, made(1, [3])])

    assert out[0].ref_logprobs is not None
    assert out[0].ref_logprobs.tolist() == [0, -1, -2]
    assert out[1].ref_logprobs is not None


async def test_at_the_temperatures_in_the_meta_of_a_group() -> None:
    given = made(0, [9, 2, 3])
    tempered = msgspec.structs.replace(given, meta={"temperatures": [0.5, 1.0, 2.0]})

    out = await drive(TorchReference(partial(TinyModel, vocabulary=VOCABULARY)), [made(1, [4]), tempered])

    model = TinyModel(vocabulary=VOCABULARY)
    for row, temperature in enumerate([0.5, 1.0, 2.0]):
        found = out[1][row].ref_logprobs
        alone = given.select(np.arange(3) == row)
        assert found is not None
        assert found.tolist() == pytest.approx(one_by_one(model, alone, temperature), abs=1e-5)
