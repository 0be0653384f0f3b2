"""A stage that needs a column which no stage before it fills is found before the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from tests.bigram import Bigram
from tests.fake_policy import FakePolicy, Letters, echo
from tests.pipeline.flow_stages import Groups
from torch.optim import SGD

from penstock import (
    AdvantageNormalizer,
    Batcher,
    GroupAssembler,
    KLReward,
    Pipeline,
    ReceiveChannel,
    RewardBridge,
    SendChannel,
    SinkTrainer,
    SourceEnv,
    StageInfo,
    Teacher,
    TrainBatch,
    TrajectoryGroup,
    TruncationMask,
    each,
    processes,
    source,
)
from penstock.errors import InvalidPipeline
from penstock.losses import (
    CISPO,
    DPPO,
    GSPO,
    KL,
    SAPO,
    AdaptiveKL,
    AdvantageWeighted,
    Distillation,
    Entropy,
    GeometricMask,
    ImportanceWeight,
    OffPolicyMask,
    PPOClip,
    SampledDistillation,
)
from penstock.torch import TorchReference, TorchTrainer


class Questions:
    """A scored data set of one question."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": "?", "answer": "!"}

    def score_answer(self, answer: str, entry: Any) -> float:
        return float(answer == entry["answer"])


def sampled(**options: Any) -> SourceEnv:
    return SourceEnv(Questions, FakePolicy(echo), Letters(), **options)


@dataclass(frozen=True)
class Pass:
    """A stage of a user, with the columns that it states."""

    needs: tuple[str, ...] = ()
    fills: tuple[str, ...] | None = None

    def stage_info(self) -> StageInfo:
        return StageInfo(needs_columns=self.needs, fills_columns=self.fills)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            await outbox.send(group)


@dataclass(frozen=True)
class Keep:
    """A sink without needs."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for _ in inbox:
            pass


async def unchanged(group: TrajectoryGroup) -> TrajectoryGroup:
    return group


def chain(*stages: Any, begin: Any = None) -> Pipeline:
    flow: Any = source(begin or sampled())
    for stage in stages:
        flow = flow.then(stage)
    pipeline: Pipeline = flow.sink(Keep())
    return pipeline


def trained(loss: Any, *stages: Any, **options: Any) -> Pipeline:
    flow: Any = source(sampled())
    for stage in stages:
        flow = flow.then(stage)
    trainer = TorchTrainer(Bigram(), optimizer=SGD, loss=loss, **options)
    pipeline: Pipeline = flow.then(Batcher(max_tokens=64)).sink(SinkTrainer(trainer))
    return pipeline


def complaint(pipeline: Pipeline) -> str:
    with pytest.raises(InvalidPipeline) as raised:
        pipeline.check()
    return str(raised.value)


REFERENCE = TorchReference(Bigram)
TEACHER = Teacher(policy=None, top_k=2)  # type: ignore[arg-type]
TEACHER_COLUMNS = "it needs the columns teacher_ids and teacher_logprobs, which no stage before it fills: put a Teacher"


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        (AdvantageNormalizer("gae"), "AdvantageNormalizer: it needs the column values, which no stage before it fills"),
        (AdvantageNormalizer("grpo", rewards="token"), "it needs the column token_rewards"),
        (AdvantageNormalizer("grpo", rewards="both"), "set turn_rewards=True of SourceEnv"),
        (KLReward(0.1), "KLReward: it needs the column ref_logprobs, which no stage before it fills: put a TorchRef"),
        (Pass(needs=("teacher_ids", "teacher_logprobs")), f"Pass: {TEACHER_COLUMNS}"),
        (Pass(needs=("reward_noise",)), "put a stage of your own that fills it before it"),
        (Pass(needs=("teacher_id",)), "Pass: StageInfo: expected columns of a record, reward_noise, behavior_logprobs"),
        (Pass(fills=("value",)), "got value"),
    ],
)
def test_a_stage_without_its_column_is_refused(stage: Any, problem: str) -> None:
    message = complaint(chain(RewardBridge(), TruncationMask(), stage))

    assert problem in message
    assert len(message.splitlines()) == 1


def test_a_stage_that_fills_the_column_too_late_is_named() -> None:
    assert "put TorchReference before it" in complaint(chain(KLReward(0.1), REFERENCE))
    assert "put Pass before it" in complaint(chain(AdvantageNormalizer("gae"), Pass(fills=("values",))))


@pytest.mark.parametrize(
    "stages",
    [
        (REFERENCE, KLReward(0.1)),
        (REFERENCE, KLReward(0.1, level="token"), AdvantageNormalizer("grpo", rewards="both")),
        (Pass(fills=("values",)), AdvantageNormalizer("gae")),
        (TEACHER, TruncationMask(), Pass(needs=("teacher_ids", "teacher_logprobs", "tokens", "rewards"))),
        (Pass(), AdvantageNormalizer("gae")),
        (each(unchanged), KLReward(0.1)),
    ],
)
def test_a_column_that_is_or_may_be_filled_is_accepted(stages: tuple[Any, ...]) -> None:
    chain(*stages).check()


def test_turn_rewards_of_a_source_are_known() -> None:
    chain(AdvantageNormalizer("grpo", rewards="token"), begin=sampled(turn_rewards=True)).check()


def test_what_a_source_of_your_own_sends_is_not_judged() -> None:
    chain(AdvantageNormalizer("gae"), Pass(needs=("teacher_ids",)), begin=Groups(1)).check()


def test_stages_within_a_fragment_are_judged_in_their_place() -> None:
    alone = source(source(sampled()).then(AdvantageNormalizer("gae")), on=processes(1)).sink(Keep())
    filled = source(source(sampled()).then(REFERENCE), on=processes(1)).then(KLReward(0.1)).sink(Keep())

    assert "AdvantageNormalizer: it needs the column values" in complaint(alone)
    filled.check()


LOSSES: list[tuple[Any, str]] = [
    (PPOClip(), "column advantages"),
    (PPOClip(old="proximal"), "column advantages"),
    (GSPO(), "column advantages"),
    (CISPO(), "column advantages"),
    (DPPO(), "column advantages"),
    (SAPO(), "column advantages"),
    (AdvantageWeighted(), "column advantages"),
    (AdvantageWeighted() * ImportanceWeight() * GeometricMask(), "column advantages"),
    (SampledDistillation() * OffPolicyMask(1.0), "column advantages"),
    (0.1 * KL() - 0.1 * Entropy(), "column ref_logprobs"),
    (AdaptiveKL(0.1, 0.1), "column ref_logprobs"),
    (Distillation(), "columns teacher_ids and teacher_logprobs"),
    (SampledDistillation().aggregated("seq-mean-token-mean"), "columns teacher_ids and teacher_logprobs"),
]


@pytest.mark.parametrize(("loss", "problem"), LOSSES, ids=[repr(loss) for loss, _ in LOSSES])
def test_a_trainer_is_refused_without_the_columns_of_its_loss(loss: Any, problem: str) -> None:
    message = complaint(trained(loss))

    assert f"SinkTrainer: it needs the {problem}, which no stage before it fills" in message


def test_a_trainer_with_all_columns_of_its_loss_is_accepted() -> None:
    trained(PPOClip(), AdvantageNormalizer("grpo")).check()
    trained(Entropy()).check()
    trained(Distillation(), TEACHER).check()
    trained(PPOClip() + KL(), AdvantageNormalizer("grpo"), REFERENCE).check()
    trained(PPOClip() + AdaptiveKL(0.1, 0.1), AdvantageNormalizer("grpo"), reference=Bigram()).check()
    trained(lambda scored: scored.advantage().mean()).check()


def test_an_assembler_adds_no_column() -> None:
    assert "column values" in complaint(chain(GroupAssembler(8, deadline_s=1), AdvantageNormalizer("gae")))


def test_the_packed_batch_has_the_columns_of_its_groups() -> None:
    class Judge:
        def stage_info(self) -> StageInfo:
            return StageInfo(needs_columns=("teacher_ids",))

        async def run(self, inbox: ReceiveChannel[TrainBatch]) -> None:
            async for _ in inbox:
                pass

    pipeline = source(sampled()).then(Batcher(max_tokens=64)).sink(Judge())

    assert "Judge: it needs the column teacher_ids" in complaint(pipeline)
