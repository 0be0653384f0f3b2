"""The generator and the entry point say what is wrong before anything starts, and need no SkyRL for it."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from tests.skyrl.contract import OUTPUT
from tests.skyrl.flows import Sends, sampled
from tests.stages.turns import of_turns

from penstock import source
from penstock._stages.batching.batcher import NOTHING_TO_TRAIN
from penstock._stages.integrations.skyrl import generator as generators
from penstock._stages.integrations.skyrl.entry import split
from penstock._stages.integrations.skyrl.samples import KEYS
from penstock.errors import FlowEnded, InvalidConfig, InvalidPipeline, MissingExtra
from penstock.integrations.skyrl import PenstockGenerator

NAMED = "penstock.generator=run:generator"


def config(eval_interval: int = -1, **generator: Any) -> Any:
    options = {
        "n_samples_per_prompt": 4,
        "sampling_params": SimpleNamespace(logprobs=1, temperature=1.0),
        "zero_reward_on_non_stop": False,
        "apply_overlong_filtering": False,
        "chat_template": SimpleNamespace(name_or_path=None),
        "inference_engine": SimpleNamespace(enable_return_routed_experts=False),
    }
    trainer = SimpleNamespace(eval_interval=eval_interval)
    return SimpleNamespace(generator=SimpleNamespace(**options | generator), trainer=trainer)


def generator(**options: Any) -> PenstockGenerator:
    return PenstockGenerator(lambda requests: source(requests).then(sampled()), config(**options), tokenizer=None)


def test_the_generator_has_the_keys_of_skyrl() -> None:
    assert set(KEYS) == OUTPUT
    assert len(KEYS) == 16


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("step_wise_trajectories", True, "rows for each step"),
        ("vision_language_generator", True, "images"),
        ("chat_template", SimpleNamespace(name_or_path="qwen3_without_thinking"), "the tokenizer's own"),
        ("inference_engine", SimpleNamespace(enable_return_routed_experts=True), "records neither"),
    ],
)
def test_what_penstock_does_not_have_is_refused_when_the_generator_is_made(
    option: str, value: Any, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        generator(**{option: value})


def test_an_evaluation_by_skyrl_is_refused_where_the_prompts_are_not_its_own() -> None:
    flow = source(Sends([]))

    assert "0 not answered" in repr(PenstockGenerator(flow, config(), tokenizer=None))
    with pytest.raises(InvalidConfig, match=r"trainer\.eval_interval: expected -1, .* got 5"):
        PenstockGenerator(flow, config(eval_interval=5), tokenizer=None)
    assert generator()


def test_a_trainer_that_does_not_commit_is_refused_at_its_first_batch() -> None:
    with pytest.raises(InvalidPipeline, match=r"generator\.trainer\(RayPPOTrainer\)"):
        anyio.run(generator().generate, {"prompts": []})


@pytest.mark.skipif(importlib.util.find_spec("skyrl") is not None, reason="SkyRL is installed")
def test_without_skyrl_the_command_that_installs_it_is_named() -> None:
    with pytest.raises(MissingExtra, match=r"pip install .*\[skyrl\]'"):
        generator().trainer(object)


def test_a_generator_that_was_not_started_has_neither_statistics_nor_a_report() -> None:
    made = generator()

    made.training.end()

    assert made.report is None
    assert repr(made).startswith("<PenstockGenerator: not started, version 0")
    with pytest.raises(RuntimeError, match="before training began"):
        made.statistics()


def test_the_entry_point_takes_its_own_arguments_and_leaves_skyrls() -> None:
    entry = "trainer.override_entrypoint=penstock.integrations.skyrl"

    assert split([entry, "trainer.epochs=1", NAMED]) == ("run:generator", ["trainer.epochs=1"])
    for arguments in ([entry], [NAMED, NAMED]):
        with pytest.raises(InvalidConfig, match=r"expected one argument penstock\.generator=module:function"):
            split(arguments)


class Skyrl:
    """Stands for the objects of SkyRL: its metrics, and a tokenizer."""

    pad_token_id = 0

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Return no metrics."""
        return {}


def ids(instance_id: str) -> list[Any]:
    return [SimpleNamespace(instance_id=instance_id, repetition_id=repetition) for repetition in range(2)]


def asked(instance_id: str) -> dict[str, Any]:
    """Return an input of SkyRL: two repetitions of a prompt."""
    return {
        "prompts": [[], []],
        "env_classes": ["sums", "sums"],
        "trajectory_ids": ids(instance_id),
    }


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[PenstockGenerator]:
    """A generator whose training has begun; its flow sends three groups, and ends."""
    monkeypatch.setattr(generators, "object_in", lambda *_: Skyrl)
    groups = [of_turns(".x", ".x", instance_id=name, behavior_logprobs=np.zeros(4)) for name in "abc"]
    made = PenstockGenerator(source(Sends(groups, stays=False)), config(n_samples_per_prompt=2), tokenizer=Skyrl)
    made.training.weights_wanted(None, 0)
    yield made
    made.training.end()


def test_every_row_that_skyrl_was_given_ends_once(trained: PenstockGenerator) -> None:
    made = trained
    first, again, other = (asyncio.run(made.generate(asked(name))) for name in ("7", "7", "8"))

    made.training.rows.batch(again | {"loss_masks": [[1], [0]]})
    made.training.weights_wanted(None, 1)
    made.training.end()

    assert [first["trajectory_ids"], other["trajectory_ids"]] == [ids("7"), ids("8")]
    assert made.report is not None
    assert {state: dict(reasons) for state, reasons in made.report.balance.reasons.items() if reasons} == {
        "trained": {"": 1},
        "filtered": {"dropped by SkyRL": 4, NOTHING_TO_TRAIN: 1},
    }


def test_a_call_after_the_flows_last_group_raises(trained: PenstockGenerator) -> None:
    for name in "123":
        asyncio.run(trained.generate(asked(name)))

    with pytest.raises(FlowEnded, match="SkyRL waits for more samples than the 3"):
        asyncio.run(trained.generate(asked("4")))


async def collected(group: str) -> str:
    """Return a group that has arrived."""
    return group


def test_the_loop_of_a_fully_asynchronous_trainer_raises_the_error_of_the_generation(
    trained: PenstockGenerator,
) -> None:
    training = trained.training
    training.begin(fully_async=True)

    async def train() -> None:
        generating = asyncio.create_task(trained.generate({"prompts": [], "trajectory_ids": ids("7") * 2}))
        with pytest.raises(InvalidPipeline, match="every trajectory_id once"):
            await training.failure.unless_failed(asyncio.Event().wait())
        assert await training.failure.unless_failed(collected("arrived before")) == "arrived before"
        assert generating.cancel()

    asyncio.run(train())
