"""Parts of a chain that have different tokenizers are found before anything runs, wherever they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog
from tests.pipeline.flow_stages import Groups, Pack, Train

from arithmetic.tokenizer import TOKENIZER
from penstock import (
    Pipeline,
    ReceiveChannel,
    RewardBridge,
    SendChannel,
    SinkTrainer,
    SourceChannel,
    Stage,
    StageInfo,
    Teacher,
    TrainBatch,
    TrajectoryGroup,
    here,
    joining,
    processes,
    source,
)
from penstock.errors import InvalidPipeline
from penstock.policies import NoOpPolicy, tokenizer_identity
from penstock.teachers import HttpTeacher
from penstock.trackers import Samples


@dataclass(frozen=True)
class Words:
    """A tokenizer, as far as its identity goes."""

    decode_events: tuple[str, ...] = ("yes", "no")
    eos_id: int = 1

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.decode_events)}


OTHER = Words(("no", "yes"))


def tokens_of(*owners: Any) -> tuple[Any, ...]:
    found = (owner.tokenizer for owner in owners if hasattr(owner, "tokenizer"))
    return tuple(tokenizer for tokenizer in found if tokenizer is not None)


@dataclass(frozen=True)
class Says(Groups):
    count: int = 1
    policy: Any = field(default=None, kw_only=True)

    def stage_info(self) -> StageInfo:
        return StageInfo(tokenizers=tokens_of(self, self.policy))


@dataclass(frozen=True)
class Reads:
    """A stage between source and trainer."""

    tokenizer: Any = None

    def stage_info(self) -> StageInfo:
        return StageInfo(tokenizers=tokens_of(self))

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            await outbox.send(group)


@dataclass
class Has:
    """Anything with a tokenizer."""

    tokenizer: Any


@dataclass(frozen=True)
class Trains(Train):
    trainer: Any = field(default=None)

    def stage_info(self) -> StageInfo:
        return StageInfo(tokenizers=None if self.trainer is None else tokens_of(self.trainer))


def chain(samples: Says, reads: Reads, trains: Trains) -> Pipeline:
    return source(samples).then(reads).then(Pack()).sink(trains)


def test_equal_and_unknown_tokenizers_are_accepted() -> None:
    chain(Says(tokenizer=Words()), Reads(Words()), Trains(trainer=Has(Words()))).check()
    chain(Says(tokenizer=Words()), Reads(object()), Trains()).check()
    chain(Says(tokenizer=TOKENIZER, policy=NoOpPolicy()), Reads(TOKENIZER), Trains()).check()


@pytest.mark.parametrize(
    ("samples", "reads", "trains", "who"),
    [
        (Says(tokenizer=Words()), Reads(OTHER), Trains(), "Says and Reads"),
        (Says(tokenizer=Words()), Reads(), Trains(trainer=Has(OTHER)), "Says and Trains"),
        (Says(policy=Has(OTHER)), Reads(Words()), Trains(), "Says and Reads"),
        (Says(tokenizer=OTHER, policy=Has(Words())), Reads(), Trains(), "Says and Says"),
        (Says(tokenizer=TOKENIZER), Reads(Words()), Trains(), "Says and Reads"),
        (Says(tokenizer=Words()), Reads(tokenizer_identity(OTHER)), Trains(), "Says and Reads"),
    ],
)
def test_two_that_differ_are_refused_with_both_identities(
    samples: Says, reads: Reads, trains: Trains, who: str
) -> None:
    with pytest.raises(InvalidPipeline, match=f"{who} have tokenizers of different vocabulary") as refused:
        chain(samples, reads, trains).check()

    assert (
        str(refused.value).count("Words: 2 tokens #") + str(refused.value).count("CharacterTokenizer: 14 tokens") == 2
    )


def teacher_with(tokenizer: Words) -> HttpTeacher:
    return HttpTeacher(url="http://127.0.0.1:1", model="large", tokenizer=tokenizer)


class Steps:
    def step(self, _: TrainBatch) -> dict[str, float]:
        return {}


NEEDS = {
    "a reward that reads text": (RewardBridge.from_config({"format_markers": [{"marker": "a", "reward": 1}]}), ()),
    "a teacher": (Teacher(teacher_with(Words()), top_k=2), ()),
    "samples": (Reads(), (Samples(),)),
}
"""A stage, and the samples of the sink: one of them needs the tokenizer of the tokens."""


@pytest.mark.parametrize(("stage", "samples"), NEEDS.values(), ids=NEEDS)
def test_a_stage_that_needs_the_tokenizer_is_refused_unless_a_stage_before_it_states_one(
    stage: Stage[TrajectoryGroup, TrajectoryGroup], samples: tuple[Samples, ...]
) -> None:
    def run(first: Says, on: Any = None) -> Pipeline:
        sink = SinkTrainer(Steps(), samples=next(iter(samples), None))
        return source(first).then(stage, on=on or here()).then(Pack()).sink(sink)

    run(Says(tokenizer=Words())).check()
    run(Says(policy=Has(Words()))).check()
    source(source(Says(tokenizer=Words())).then(stage)).then(Pack()).sink(Train()).check()
    with pytest.raises(InvalidPipeline, match=r"expected the tokenizer of the tokens that it receives, and no stage"):
        run(Says()).check()
    if not samples:
        with pytest.raises(InvalidPipeline, match="and a worker that joins is not sent one"):
            run(Says(tokenizer=Words()), joining(expected=1, url="tcp://127.0.0.1:0")).check()


def test_a_teacher_with_another_tokenizer_than_the_source_is_refused() -> None:
    with pytest.raises(InvalidPipeline, match="Says and Teacher have tokenizers of different vocabulary"):
        source(Says(tokenizer=Words())).then(Teacher(teacher_with(OTHER), top_k=2)).then(Pack()).sink(Train()).check()


def test_a_source_in_processes_and_a_stage_within_a_fragment_are_looked_at_too() -> None:
    fragment = source(Says(tokenizer=Words())).then(Reads(OTHER))

    with pytest.raises(InvalidPipeline, match="Says and Reads have tokenizers of different vocabulary"):
        source(fragment, on=processes(2)).then(Pack()).sink(Train()).check()


def test_one_tokenizer_that_all_share_is_looked_at_once() -> None:
    class Counted(Words):
        looks = 0

        def get_vocab(self) -> dict[str, int]:
            Counted.looks += 1
            return super().get_vocab()

    shared = Counted()
    chain(Says(tokenizer=shared), Reads(shared), Trains(trainer=Has(shared))).check()

    assert Counted.looks == 1


def test_senders_from_outside_are_expected_to_have_the_trainers_tokenizer() -> None:
    run = source(SourceChannel(tokenizer=Words())).then(Pack()).sink(Trains(trainer=Has(OTHER)))

    with pytest.raises(InvalidPipeline, match="SourceChannel and Trains have tokenizers of different vocabulary"):
        run.check()


@pytest.mark.parametrize(
    ("samples", "trains", "untold"),
    [
        (Says(tokenizer=Words()), Trains(trainer=Has(None)), ["Trains"]),
        (Says(tokenizer=object()), Trains(trainer=Has(Words())), ["Says"]),
        (Says(policy=Has(Words())), Trains(trainer=Has(Words())), []),
        (Says(), Trains(trainer=Has(None)), []),
        (Says(tokenizer=Words()), Trains(), []),
    ],
)
def test_a_source_and_a_trainer_that_cannot_be_compared_are_logged_in_one_line(
    samples: Says, trains: Trains, untold: list[str]
) -> None:
    with structlog.testing.capture_logs() as logs:
        chain(samples, Reads(Words()), trains).check()

    assert [line["unknown_to"] for line in logs if line["event"] == "tokenizers_not_compared"] == untold


def test_a_source_within_a_fragment_is_the_source() -> None:
    fragment = source(Says(tokenizer=Words())).then(Reads())

    with structlog.testing.capture_logs() as logs:
        source(fragment, on=processes(2)).then(Pack()).sink(Trains(trainer=Has(Words()))).check()

    assert not logs
