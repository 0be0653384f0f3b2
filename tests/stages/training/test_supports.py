"""The support of a truncated draw: kept by the sampler, and applied by the trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.fake_policy import Letters
from tests.tiny_model import TinyModel
from torch import Tensor

from penstock import AdvantageNormalizer, SourceEnv, TrainBatch, TrajectoryGroup, Worker
from penstock.errors import InvalidConfig, InvalidRecord
from penstock.losses import AdvantageWeighted, Entropy
from penstock.policies import Completion, SamplingParams
from penstock.testing import drive, drive_source
from penstock.torch import Attention, TorchPolicy, TorchReference, TorchTrainer

VOCABULARY = 11
EOS = 3
PROMPTS = [np.array(tokens, np.int32) for tokens in ([1, 2, 4, 5, 6], [7], [8, 9, 1])] * 4
TRUNCATIONS = {
    "top_k": SamplingParams(max_completion_tokens=9, top_k=3, keep_support=True),
    "top_p": SamplingParams(max_completion_tokens=9, top_k=6, top_p=0.6, temperature=0.7, keep_support=True),
    "min_p": SamplingParams(max_completion_tokens=9, top_k=8, min_p=0.4, keep_support=True),
    "penalty": SamplingParams(max_completion_tokens=9, top_k=4, repetition_penalty=1.7, keep_support=True),
    "all": SamplingParams(max_completion_tokens=9, top_k=VOCABULARY + 5, keep_support=True),
}


async def sampled(sampling: SamplingParams) -> list[Completion]:
    async with TorchPolicy(TinyModel, EOS).open(Worker()) as engine:
        return await engine.generate(PROMPTS, sampling)


@torch.no_grad()
def logits_of(prompt: NDArray[np.int32], completion: Completion) -> torch.Tensor:
    """Return [C, V] the logits that each token of the completion was drawn from."""
    tokens = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))[None]
    attend = Attention.causal(torch.ones_like(tokens, dtype=torch.bool))
    logits: torch.Tensor = TinyModel()(tokens, positions=torch.arange(tokens.shape[1])[None], attend=attend)
    return logits[0, len(prompt) - 1 : -1]


def over(logits: torch.Tensor, support: NDArray[np.int32]) -> torch.Tensor:
    """Return [C, V] log-probabilities over `support` [C, W] alone."""
    kept = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in enumerate(support):
        kept[row, torch.from_numpy(ids[ids >= 0].astype(np.int64))] = True
        if not (ids >= 0).any():
            kept[row] = True
    return torch.log_softmax(logits.masked_fill(~kept, -torch.inf), -1)


@pytest.mark.parametrize("name", TRUNCATIONS)
async def test_a_sampler_reports_the_tokens_it_drew_from_and_logprobs_over_them(name: str) -> None:
    sampling = TRUNCATIONS[name]

    for prompt, found in zip(PROMPTS, await sampled(sampling), strict=True):
        assert found.support_ids is not None
        assert found.logprobs is not None
        assert found.support_ids.shape == (len(found.tokens), sampling.top_k)
        logprobs = over(logits_of(prompt, found) / sampling.temperature, found.support_ids)
        expected = logprobs[torch.arange(len(found.tokens)), torch.from_numpy(found.tokens.astype(np.int64))]
        np.testing.assert_allclose(found.logprobs, expected.numpy(), atol=1e-4)


async def test_a_support_is_that_of_the_truncation() -> None:
    for name in ("top_k", "top_p", "min_p"):
        sampling = TRUNCATIONS[name]
        for prompt, found in zip(PROMPTS, await sampled(sampling), strict=True):
            probabilities = (logits_of(prompt, found) / sampling.temperature).softmax(-1).numpy()
            assert found.support_ids is not None
            for row, ids in zip(probabilities, found.support_ids, strict=True):
                kept = np.sort(row[ids[ids >= 0]])[::-1]
                left = np.sort(np.delete(row, ids[ids >= 0]))[::-1]
                assert kept[-1] >= left[0] - 1e-6  # the most probable ones
                if name == "top_k":
                    assert len(kept) == sampling.top_k
                if name == "min_p" and len(kept) < 8:
                    assert kept[-1] >= 0.4 * kept[0] - 1e-6
                    assert left[0] < 0.4 * kept[0] + 1e-6
                if name == "top_p" and len(kept) < 6:
                    of_six = np.sort(row)[-6:].sum()  # top_p is a share of what top_k left
                    assert kept[:-1].sum() < 0.6 * of_six + 1e-5
                    assert kept.sum() >= 0.6 * of_six - 1e-5


async def test_rows_that_keep_no_support_are_sampled_beside_others_as_alone() -> None:
    plain = SamplingParams(max_completion_tokens=9, top_k=3, seed=5)
    keeping = SamplingParams(max_completion_tokens=9, top_k=3, seed=5, keep_support=True)
    greedy = SamplingParams(max_completion_tokens=9, greedy=True, keep_support=True)
    found: dict[str, list[Completion]] = {}

    async with TorchPolicy(TinyModel, EOS).open(Worker()) as engine:

        async def sample(name: str, sampling: SamplingParams) -> None:
            found[name] = await engine.generate(PROMPTS, sampling)

        await sample("alone", plain)
        async with anyio.create_task_group() as tasks:
            for name, sampling in {"plain": plain, "keeping": keeping, "greedy": greedy}.items():
                tasks.start_soon(sample, name, sampling)

    for alone, beside, kept, most in zip(
        *(found[name] for name in ("alone", "plain", "keeping", "greedy")), strict=True
    ):
        assert alone.tokens.tolist() == beside.tokens.tolist() == kept.tokens.tolist()
        assert alone.logprobs is not None
        assert beside.logprobs is not None
        assert kept.logprobs is not None
        np.testing.assert_allclose(alone.logprobs, beside.logprobs, atol=1e-5)
        assert (kept.logprobs > alone.logprobs - 1e-5).all()  # of fewer tokens
        assert alone.support_ids is beside.support_ids is most.support_ids is None


class Words:
    """A scored data set: the longer an answer, the better."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": "abc"[: index + 1]}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:  # noqa: ARG002 (the protocol's)
        return float(len(set(answer)))


class Game:
    """Two turns."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return f"{seed}?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return "ab", float(len(set(action))), self.turn == 2, False, {}


def spoken() -> TinyModel:
    """Return a model of letters."""
    return TinyModel(vocabulary=128)


def source(sampling: SamplingParams | tuple[SamplingParams, ...], make_env: Any = Words) -> SourceEnv:
    policy = TorchPolicy(spoken)
    return SourceEnv(make_env, policy, Letters(), group_size=4, groups=3, sampling=sampling)


async def batch_of(sampling: SamplingParams | tuple[SamplingParams, ...], make_env: Any = Words) -> TrainBatch:
    """Return what a trainer gets of groups that were sampled so."""
    groups = await drive_source(source(sampling, make_env))
    return TrainBatch.pack(list(await drive(AdvantageNormalizer("grpo"), list(groups))))


def dense_loss(model: TinyModel, batch: TrainBatch, temperature: float, weight: float) -> Tensor:
    """Return the loss of `AdvantageWeighted` and `Entropy`, of one masked softmax for each sequence."""
    assert batch.advantages is not None
    assert batch.support_ids is not None
    losses: list[Tensor] = []
    for first, last in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        tokens = torch.from_numpy(batch.tokens[first:last].copy()).long()[None]
        attend = Attention.causal(torch.ones_like(tokens, dtype=torch.bool))
        logits = model(tokens, positions=torch.arange(tokens.shape[1])[None], attend=attend)[0, :-1] / temperature
        logprobs = over(logits, batch.support_ids[first + 1 : last])
        trains = torch.from_numpy(batch.loss_mask[first + 1 : last].copy())
        own = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
        finite = logprobs.masked_fill(logprobs.isneginf(), 0)
        entropies = -(logprobs.exp() * finite).sum(-1)
        advantages = torch.from_numpy(batch.advantages[first + 1 : last].copy())
        losses.append((-(advantages * own) - weight * entropies)[trains])
    return torch.cat(losses).mean()


@pytest.mark.parametrize("micro_batch_tokens", [16, None])
@pytest.mark.parametrize("name", ["top_k", "top_p"])
async def test_loss_and_gradient_are_those_of_a_softmax_over_the_support(
    name: str, micro_batch_tokens: int | None
) -> None:
    sampling = TRUNCATIONS[name]
    batch, model, other = await batch_of(sampling), spoken(), spoken()

    trainer = TorchTrainer(
        model,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        loss=AdvantageWeighted() - 0.1 * Entropy(),
        max_grad_norm=None,
        micro_batch_tokens=micro_batch_tokens,
        temperature=sampling.temperature,
    )
    metrics = trainer.step(batch)
    loss = dense_loss(other, batch, sampling.temperature, 0.1)
    gradients = torch.autograd.grad(loss, list(other.parameters()))

    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    for (name_of, weight), gradient in zip(other.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(model.get_parameter(name_of), weight - gradient, rtol=0, atol=2e-5)


async def test_on_policy_every_ratio_is_one_and_without_a_support_none_of_a_truncated_server_is() -> None:
    sampling = TRUNCATIONS["top_p"]
    batch = await batch_of(sampling)
    whole = msgspec.structs.replace(batch, support_ids=None)

    def ratios(given: TrainBatch) -> float:
        made = TorchTrainer(spoken(), optimizer=torch.optim.SGD, temperature=sampling.temperature)
        return made.step(given)["kl"]

    assert ratios(batch) == pytest.approx(0, abs=1e-6)
    assert ratios(whole) > 0.01


async def test_a_reference_is_scored_over_the_same_tokens() -> None:
    sampling = TRUNCATIONS["top_p"]

    groups = list(await drive_source(source(sampling)))
    scored = await drive(TorchReference(spoken, temperature=sampling.temperature), groups)

    for group in scored:
        assert group.ref_logprobs is not None
        assert group.behavior_logprobs is not None
        np.testing.assert_allclose(group.ref_logprobs, group.behavior_logprobs, atol=1e-4)


async def test_turns_of_several_parameters_share_a_column_of_the_widest() -> None:
    narrow = SamplingParams(max_completion_tokens=2, top_k=2, keep_support=True)
    plain = SamplingParams(max_completion_tokens=2)
    wide = SamplingParams(max_completion_tokens=2, top_k=5, keep_support=True)

    one, other = await batch_of((narrow, wide), Game), await batch_of((wide, plain), Game)

    assert one.support_ids is not None
    assert other.support_ids is not None
    assert one.support_ids.shape == (len(one.tokens), 5)
    assert other.support_ids.shape == (len(other.tokens), 5)
    assert set((one.support_ids >= 0).sum(1).tolist()) == {0, 2, 5}
    assert set((other.support_ids >= 0).sum(1).tolist()) == {0, 5}


def test_a_support_is_kept_of_a_bounded_number_of_tokens() -> None:
    with pytest.raises(InvalidConfig, match=r"keep_support: expected top_k beside it, .* got none: set top_k, 64"):
        SamplingParams(top_p=0.9, keep_support=True)
    SamplingParams(greedy=True, keep_support=True)


@pytest.mark.parametrize(
    ("support", "problem"),
    [
        ([[-1, -1], [4, 5], [-1, -1]], r"token 1, drawn from \[4, 5\]"),
        ([[-1, -1], [7, -2], [-1, -1]], r"ids of 0 or more, or −1 for none, got -2"),
    ],
)
def test_a_token_outside_of_its_support_is_refused(support: list[list[int]], problem: str) -> None:
    columns: dict[str, Any] = {"sequences": [[1, 7, 3]], "loss_mask": [[0, 1, 1]], "rewards": [1.0]}

    with pytest.raises(InvalidRecord, match=problem):
        TrajectoryGroup.build(env="e", instance_id="0", **columns, support_ids=support)
    good = TrajectoryGroup.build(
        env="e", instance_id="0", **columns, support_ids=[[-1, -1], [7, 5], [-1, -1]], advantages=[[1.0] * 3]
    )
    arrived = msgspec.structs.replace(TrainBatch.pack([good]), support_ids=np.array(support, np.int32))
    with pytest.raises(InvalidRecord, match=problem):  # records of other processes are built there
        TorchTrainer(TinyModel(), optimizer=torch.optim.SGD).step(arrived)
