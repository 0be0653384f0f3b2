"""`Demonstrations`: the conversations of a data set in, groups of one sequence out, whose turns of the assistant train.

The source of supervised fine-tuning. It samples nothing: the advantage of each token that trains is 1, so that the
loss `AdvantageWeighted` is its cross-entropy. Conversations leave in their order, one after another; so a run can be
repeated, and a resumed one goes on behind the last conversation that was trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Sized
from dataclasses import dataclass, replace
from functools import partial

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.accounting.epoch import Epoch
from ..._pipeline.accounting.repetition_sets import trajectories
from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.channels.channel import SendChannel
from ..._pipeline.durability.resumption import ResumePoint
from ..._pipeline.durability.run_changes import StageFacts
from ..._pipeline.errors import InvalidConfig, InvalidData, UnstableTemplate
from ..._pipeline.graph.context import current, drop
from ..._pipeline.graph.stage_info import StageInfo, tokenizer_of
from ..._pipeline.util.repeated_errors import RepeatedErrors
from ..._schemas import GroupId, TrajectoryGroup
from ..._schemas.numbers import normalize_counts
from ..contracts.prompts import identity_of
from ..data.mixture import MixedPrompts, Mixture
from ..data.prompt_dataset import LOOKED_AT, PromptDataset, PromptSet
from ..tokenizers.chat_format import ChatFormat
from ..tokenizers.trained_turns import TooLong, trained_turns

log = get_logger("penstock.demonstrations")

NAME = "demonstrations"
"""The environment in every id."""

READ_AHEAD = 32
"""Conversations that are read in one call of a thread: beside a trainer, each call waits for the interpreter."""


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Sends the conversations of a data set, epoch after epoch, to be imitated.

    Raises:
        InvalidConfig: a set without a `ChatFormat`, or a number that is not whole, or too small.
    """

    data: PromptDataset | Mixture
    """Rows whose column `prompt` has messages, answers included, and the `ChatFormat` that makes tokens of them."""
    max_length: int | None = None
    """Maximum length of a sequence in tokens; a longer conversation ends as rejected."""
    first: int = 0
    """Number of the first conversation."""

    def __post_init__(self) -> None:
        normalize_counts(self, "max_length")
        normalize_counts(self, "first", least=0)
        _ = self._formats  # checks them

    @property
    def _formats(self) -> dict[str, ChatFormat]:
        """Return the chat format of each set, by its name."""
        formats: dict[str, ChatFormat] = {}
        for each in self.data.sets if isinstance(self.data, Mixture) else (self.data,):
            if not isinstance(each.chat, ChatFormat):
                raise InvalidConfig(f"Demonstrations.data: expected {each.data_source} with chat, got {each.chat!r}")
            formats[each.data_source] = each.chat
        return formats

    def stage_info(self) -> StageInfo:
        """State the bound on a group, the tokenizer and the column."""
        return StageInfo(
            sends_at_most_tokens=self.max_length, tokenizers=tokenizer_of(self.data), fills_columns=("advantages",)
        )

    def facts(self) -> StageFacts:
        """Return the identity of the data as fixed; reads all rows."""
        return StageFacts(fixed={} if (found := identity_of(self.data)) is None else {"data": found})

    def resume_from(self, point: ResumePoint) -> Demonstrations:
        """Return the source of a resumed run: it begins behind the last conversation that was trained."""
        trained = [int(group.instance_id) for group in point.committed if group.env == NAME]
        return replace(self, first=max(trained, default=self.first - 1) + 1)

    def check(self) -> TrajectoryGroup:
        """Return the first conversation that can be trained, and look at those after it. Blocks.

        Raises:
            InvalidData: none of the first conversations can be trained; the reason is that of the first.
            UnstableTemplate: the template writes one of them in a way that cannot be trained.
            OSError: the data cannot be read.
        """
        prompts, problems, found = self.data(), list[InvalidData](), list[TrajectoryGroup]()
        for number in range(LOOKED_AT):
            try:
                found.append(self._group(prompts, number, 0))
            except InvalidData as error:
                problems.append(error)
        if not found:
            raise problems[0]
        return found[0]

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Send one conversation after another, without end; see `Source`.

        Raises:
            InvalidData: the source of the data has no rows that can be read.
            OSError: it cannot be read.
        """
        context, dropped = current(), RepeatedErrors(log, "conversation_dropped")
        prompts = await anyio.to_thread.run_sync(self._opened)
        epoch, sent = len(prompts) if isinstance(prompts, Sized) else 0, False
        for begin in itertools.count(self.first, READ_AHEAD):
            read = partial(self._read, prompts, begin, context.ledger.step)
            for number, group in enumerate(await anyio.to_thread.run_sync(read), begin):
                prompt = GroupId(NAME, str(number))
                context.ledger.admit(prompt, range(1))
                ids = trajectories(prompt, 1)
                if isinstance(group, TooLong):
                    looked_at = number + 1 - self.first
                    context.ledger.epoch = Epoch(epoch, none_fits=not sent and looked_at >= epoch > 0)
                    drop(ids, "rejected", str(group))  # not logged: it is the user's own bound
                elif isinstance(group, Exception):
                    drop(ids, "failed", str(group))
                    dropped.record(group, number=number, reason=str(group))
                else:
                    sent = True
                    context.ledger.succeed()
                    context.metrics.total("rollout/trajectories", 1)
                    await outbox.send(group)

    def _opened(self) -> PromptSet | MixedPrompts:
        return self.data()

    def _read(
        self, prompts: PromptSet | MixedPrompts, begin: int, version: int
    ) -> list[TrajectoryGroup | InvalidData | UnstableTemplate]:
        """Return the conversations from `begin` on as groups, or why one cannot be trained."""
        read = list[TrajectoryGroup | InvalidData | UnstableTemplate]()
        for number in range(begin, begin + READ_AHEAD):
            try:
                read.append(self._group(prompts, number, version))
            except (InvalidData, UnstableTemplate) as error:
                read.append(error)
        return read

    def _group(self, prompts: PromptSet | MixedPrompts, number: int, version: int) -> TrajectoryGroup:
        """Return conversation `number` as a group, of the weights of `version`."""
        said = prompts.conversation(number)
        try:
            tokens, mask = trained_turns(self._formats[said.data_source], said.messages, self.max_length)
        except TooLong:
            raise  # without the place: the rows that are too long have one reason
        except (InvalidData, UnstableTemplate) as error:
            raise type(error)(f"{said.place}: {error}") from error
        return _group_of(number, tokens, mask, version, said.data_source)


def _group_of(
    number: int, tokens: NDArray[np.int32], mask: NDArray[np.bool_], version: int, data_source: str
) -> TrajectoryGroup:
    return TrajectoryGroup.build(
        env=NAME,
        instance_id=str(number),
        sequences=[tokens],
        loss_mask=[mask],
        rewards=np.zeros(1, np.float32),
        advantages=[mask.astype(np.float32)],
        policy_versions=np.array([version], np.int64),
        meta={"data_source": data_source, "task": number},
    )
