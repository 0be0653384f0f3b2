"""Advantages, with the preset of each library, beside its own code. `make test-oracles` runs this file."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.oracles_real import of_openrlhf, of_skyrl, of_trl, of_verl
from tests.oracles_real.batches import Batch
from tests.oracles_real.release import checkout
from tests.oracles_real.rollouts import ROLLOUTS, WEIGHTS, Rollouts
from torch import Tensor

from penstock import AdvantageNormalizer
from penstock.testing import drive

GAMMA, LAMBDA = 0.9, 0.8

EVEN = ("even", "pairs", "equal", "whole")

Advantages = Callable[[Rollouts], Tensor]


def verl(name: str, *, indexed: bool = True, valued: bool = False, **options: Any) -> Advantages:
    """Return the advantages of `compute_<name>`, which takes the groups, or the values of a critic."""

    def advantages(given: Rollouts) -> Tensor:
        more = {"index": given.index} if indexed else {"values": given.values} if valued else {}
        found: Tensor
        found, _ = of_verl.VERL.get(of_verl.CORE, f"compute_{name}")(
            given.token_rewards, response_mask=given.floats, **more, **options
        )
        return found

    return advantages


def verl_gdpo(given: Rollouts) -> Tensor:
    """Return the advantages of `compute_gdpo_outcome_advantage` with components."""
    prompts = torch.zeros(len(given.rewards), 1, dtype=torch.int64)
    found: Tensor
    found, _ = of_verl.VERL.get(of_verl.CORE, "compute_gdpo_outcome_advantage")(
        given.token_rewards,
        given.floats,
        given.index,
        config={"gdpo_reward_keys": list(WEIGHTS), "gdpo_reward_weights": list(WEIGHTS.values())},
        non_tensor_batch={name: given.parts[:, place].numpy() for place, name in enumerate(WEIGHTS)},
        batch={"prompts": prompts, "attention_mask": torch.cat([prompts + 1, torch.ones_like(given.mask.long())], 1)},
    )
    return found


def skyrl(name: str, **options: Any) -> Advantages:
    """Return the advantages of `compute_<name>`."""

    def advantages(given: Rollouts) -> Tensor:
        with of_trl.in_float64():
            found: Tensor
            found, _ = of_skyrl.SKYRL.get(of_skyrl.PPO, f"compute_{name}")(
                given.token_rewards, response_mask=given.floats, index=given.index, values=given.values, **options
            )
        return found

    return advantages


def trl(name: str = "grpo", *, of_parts: bool = False, **options: Any) -> Advantages:
    """Return the advantages that a trainer gives the completions; with `of_parts` from the components."""

    def advantages(given: Rollouts) -> Tensor:
        zeros = torch.zeros(given.mask.shape, dtype=torch.float64)
        batch = Batch(zeros, zeros, zeros, zeros, zeros, given.mask)
        weights = torch.tensor(list(WEIGHTS.values()) if of_parts else [1.0], dtype=torch.float64)
        of_trainer = of_trl.trainer(name, num_generations=given.sizes[0], reward_weights=weights, **options)
        rewards = given.parts if of_parts else given.rewards[:, None]
        found: Tensor = of_trl.completions(of_trainer, batch, rewards)["advantages"]
        return found[:, None] * given.floats

    return advantages


def roll(estimator: str, *, whitens: bool) -> Advantages:
    """Return the advantages of ROLL's `compute_advantage`, whose checkout `ROLL` names; they are of float32."""

    def advantages(given: Rollouts) -> Tensor:
        data = SimpleNamespace(batch={"token_level_rewards": given.token_rewards, "values": given.values}, meta_info={})
        checkout("ROLL").get("roll.utils.functionals", "compute_advantage")(
            data, GAMMA, LAMBDA, estimator, whiten_advantages=whitens, response_mask=given.floats
        )
        found: Tensor = data.batch["advantages"]
        return found

    return advantages


class Row(NamedTuple):
    library: Any
    name: str
    """The function of the library, and what is special."""
    mode: Any
    peer: Advantages
    rollouts: tuple[str, ...] = tuple(ROLLOUTS)


DIFFERENT = ("ragged", "even", "pairs", "whole")
"""Rollouts that can be whitened."""

TABLE = [
    Row("verl", "grpo", "grpo", verl("grpo_outcome_advantage")),
    Row("verl", "grpo_vectorized", "grpo", verl("grpo_vectorized_outcome_advantage")),
    Row("verl", "grpo without std", "dr_grpo", verl("grpo_outcome_advantage", norm_adv_by_std_in_grpo=False)),
    Row("verl", "gdpo", "gdpo", verl_gdpo, DIFFERENT),
    Row("verl", "rloo", "rloo", verl("rloo_outcome_advantage")),
    Row("verl", "rloo_vectorized", "rloo", verl("rloo_vectorized_outcome_advantage"), EVEN),
    Row("verl", "opo", "opo", verl("opo_outcome_advantage")),
    Row(
        "verl",
        "reinforce_plus_plus",
        "reinforce++",
        verl("reinforce_plus_plus_outcome_advantage", indexed=False, config=SimpleNamespace(gamma=GAMMA)),
        DIFFERENT,
    ),
    Row(
        "verl",
        "reinforce_plus_plus_baseline",
        "reinforce++-baseline",
        verl("reinforce_plus_plus_baseline_outcome_advantage"),
        DIFFERENT,
    ),
    Row("verl", "gae", "gae", verl("gae_advantage_return", indexed=False, valued=True, gamma=GAMMA, lam=LAMBDA)),
    Row("skyrl", "grpo", "grpo", skyrl("grpo_outcome_advantage")),
    Row("skyrl", "grpo without std", "dr_grpo", skyrl("grpo_outcome_advantage", grpo_norm_by_std=False)),
    Row("skyrl", "rloo", "rloo", skyrl("rloo_outcome_advantage")),
    Row("skyrl", "maxrl", "maxrl", skyrl("maxrl_advantage")),
    Row("skyrl", "reinforce++", "reinforce++", skyrl("reinforce_plus_plus_outcome_advantage", gamma=GAMMA), DIFFERENT),
    Row("skyrl", "gae", "gae", skyrl("gae_advantage_return", gamma=GAMMA, lambd=LAMBDA)),
    Row("trl", "grpo", "grpo", trl(), EVEN),
    Row("trl", "scale_rewards none", "dr_grpo", trl(scale_rewards="none"), EVEN),
    Row("trl", "scale_rewards batch", "batch", trl(scale_rewards="batch"), EVEN),
    Row(
        "trl",
        "normalize_then_sum",
        "gdpo",
        trl(of_parts=True, multi_objective_aggregation="normalize_then_sum"),
        EVEN,
    ),
    Row("roll", "reinforce", "reinforce++", roll("reinforce", whitens=True), ("whole",)),
    Row("roll", "gae", "gae", roll("gae", whitens=False)),
    Row("trl", "rloo", "rloo", trl("rloo", beta=0.0, normalize_advantages=False, reward_clip_range=None), EVEN),
]

RELEASES = {"verl": of_verl.VERL, "skyrl": of_skyrl.SKYRL, "trl": of_trl.TRL, "roll": "ROLL"}

CELLS = [
    pytest.param(row, rollouts, id=f"{RELEASES[row.library]}: {row.name}: {rollouts}")
    for row in TABLE
    for rollouts in row.rollouts
]


def stage(row: Row, given: Rollouts) -> AdvantageNormalizer:
    """Return the stage with the preset of the library."""
    gathers = row.mode in ("batch", "gdpo", "reinforce++", "reinforce++-baseline")
    whitens = row.mode == "gae" and row.library != "roll"
    return AdvantageNormalizer(
        row.mode,
        preset=row.library,
        batch_groups=len(given.sizes) if gathers or whitens else None,
        gamma=GAMMA if row.mode in ("reinforce++", "gae") else 1.0,
        gae_lambda=LAMBDA if row.mode == "gae" else 1.0,
        components=WEIGHTS if row.mode == "gdpo" else None,
    )


async def ours(normalizer: AdvantageNormalizer, given: Rollouts) -> Tensor:
    """Return [B, L] the advantages of a stage."""
    out = await drive(normalizer, given.groups())
    rows = [np.array(group.advantages).reshape(len(group), -1)[:, 1:] for group in out]
    return torch.tensor(np.concatenate(rows), dtype=torch.float64)


@pytest.mark.parametrize(("row", "rollouts"), CELLS)
async def test_a_preset_gives_the_advantages_of_its_library(row: Row, rollouts: str) -> None:
    given = ROLLOUTS[rollouts]

    found = await ours(stage(row, given), given)

    torch.testing.assert_close(found, (row.peer(given) * given.floats).double(), rtol=1e-6, atol=2e-6)


# -- OpenRLHF, of which there is no preset -----------------------------------------------------------------------------


def openrlhf(given: Rollouts, estimator: str, *, std: bool = True) -> Tensor:
    """Return the advantages of `RemoteExperienceMaker.compute_advantages_and_returns`."""
    advantage = SimpleNamespace(estimator=estimator, gamma=1.0, lambd=LAMBDA, no_std_norm=not std)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        rollout=SimpleNamespace(n_samples_per_prompt=given.sizes[0]),
        reward=SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
    )
    module = "openrlhf.trainer.ppo_utils.experience_maker"
    maker = object.__new__(of_openrlhf.OPENRLHF.get(module, "RemoteExperienceMaker"))
    maker.__dict__.update(
        strategy=SimpleNamespace(args=args), advantage_estimator=estimator, kl_ctl=SimpleNamespace(value=0.0)
    )
    experience = SimpleNamespace(
        rewards=given.rewards,
        index=list(range(len(given.rewards))),
        info={},
        kl=torch.zeros(given.mask.shape, dtype=torch.float64),
        action_mask=given.floats,
        values=given.values,
    )
    maker.compute_advantages_and_returns([experience])
    found: Tensor = experience.advantages * given.floats
    return found


@pytest.mark.parametrize("rollouts", EVEN)
@pytest.mark.parametrize(("estimator", "mode"), [("rloo", "rloo"), ("dr_grpo", "dr_grpo"), ("group_norm", "grpo")])
async def test_advantages_against_the_group_are_those_of_openrlhf(rollouts: str, estimator: str, mode: Any) -> None:
    """Its ε of 1e-9 is the only difference: of 1e-6 of a σ, which is above 0.3 here."""
    given = ROLLOUTS[rollouts]

    found = await ours(AdvantageNormalizer(mode), given)

    torch.testing.assert_close(found, openrlhf(given, estimator), rtol=1e-5, atol=1e-6)


async def test_openrlhf_whitens_with_a_variance_that_is_not_corrected() -> None:
    given = ROLLOUTS["even"]
    tokens = int(given.mask.sum())

    found = await ours(AdvantageNormalizer("reinforce++-baseline", batch_groups=3, preset="verl"), given)

    expected = openrlhf(given, "reinforce_baseline") * ((tokens - 1) / tokens) ** 0.5
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
