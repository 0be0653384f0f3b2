"""RewardBridge: the environment's raw score to the reward that trains, shaped by configuration and by functions.

Only sampled tokens are judged: tokens outside the loss mask (prompts, observations, tool results) are never decoded,
and no token is decoded if no component reads text. The arithmetic is in `reward_shaping`, the calls of Python functions
are in `reward_calls`; this stage decodes, gathers and accounts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.accounting.end_states import EndState
from ..._pipeline.channels.channel import ReceiveChannel, SendChannel
from ..._pipeline.channels.chunks import MAX_CHUNK, receive_chunks, send_all
from ..._pipeline.durability.run_changes import StageFacts
from ..._pipeline.errors import InvalidConfig
from ..._pipeline.graph.context import current, drop
from ..._pipeline.graph.stage_info import StageInfo
from ..._pipeline.util.exception_groups import unwrap_first
from ..._pipeline.util.user_code import await_user, call_user, open_user
from ..._schemas import TrajectoryGroup, TrajectoryId
from ..._schemas.config import load_config, parse_config
from ..contracts.group_stack import GroupStack
from ..contracts.policies import Tokenizer
from ..tokenizers.end_tokens import end_ids_of
from .configured_functions import configured_functions
from .reward_calls import Calls, Outcome, RewardFailure
from .reward_functions import RewardComponent
from .reward_input import RewardInput
from .reward_shaping import RewardConfig, bounty_of_lengths, combined, failed, penalty_of_lengths, reward_of_format

Turns: TypeAlias = list[list[str]]
"""The text of each completion, turn by turn."""

DECODE_IN_THREAD_TOKENS = 4096
"""From this many tokens on, decoding a group would block the event loop for milliseconds."""

UNCHANGED = RewardConfig()
"""Leaves every reward as it is."""

OWN_PARTS = frozenset({"score", "format_markers", "length_bounty", "overlong", "fallback", "clip"})


@dataclass(frozen=True, slots=True)
class RewardBridge:
    """Shape rewards. By default, groups pass as they are.

    >>> bridge = RewardBridge.from_config({"length_bounty": {"reward": -0.01, "cap": 0.5}, "clip": [-1, 1]})
    >>> bridge.config.length_bounty.unit
    'token'

    Args:
        config: the shaping.
        functions: further components, in Python, after those that the configuration names.

    Raises:
        InvalidConfig: two components have the same name, or the configuration names a function that does not exist.
    """

    config: RewardConfig = field(default_factory=RewardConfig)
    functions: Sequence[RewardComponent] = ()
    components: tuple[RewardComponent, ...] = field(init=False, repr=False, compare=False)
    """The functions that the configuration names, and `functions`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "components", (*configured_functions(self.config), *self.functions))
        names = [component.name for component in self.components]
        if taken := sorted(OWN_PARTS.intersection(names) or {name for name in names if names.count(name) > 1}):
            raise InvalidConfig(
                f"functions: expected names that differ from each other and from {', '.join(sorted(OWN_PARTS))}, got "
                f"{taken[0]!r} again: set name"
            )

    @classmethod
    def from_yaml(cls, path: str | Path, *, functions: Sequence[RewardComponent] = ()) -> Self:
        """Return the bridge that a YAML file describes; `reward_shaping` shows one.

        Raises:
            InvalidConfig: the file does not fit; the message has the path of the value, the expected and the actual
                value. Or see the class.
        """
        return cls(load_config(RewardConfig, path, root="reward"), functions)

    @classmethod
    def from_config(cls, values: Mapping[str, Any], *, functions: Sequence[RewardComponent] = ()) -> Self:
        """Return the bridge described by a mapping, as YAML or JSON would give it. Raises the errors of `from_yaml`."""
        return cls(parse_config(RewardConfig, values, root="reward"), functions)

    def stage_info(self) -> StageInfo:
        """State the columns, and that text is read if a marker, a bounty by character or a function reads it."""
        return StageInfo(needs_tokenizer=self._reads_text, fills_columns=())

    def facts(self) -> StageFacts:
        """Return the shaping, and the weights of the functions; see `StatesFacts`."""
        weights = {component.name: component.weight for component in self.components}
        return StageFacts(options={"config": self.config, "weights": weights})

    def part_weights(self) -> dict[str, float]:
        """Return the magnitude of the weight of each part that it records, by name: 1 but for functions.

        Corrections are none of them, nor are functions of weight 0.
        """
        config = self.config
        given = {"format_markers": config.format_markers, "length_bounty": config.length_bounty}
        names = ["score", *(name for name, part in (given | {"overlong": config.overlong}).items() if part)]
        weights = {component.name: abs(component.weight) for component in self.components if component.weight}
        return dict.fromkeys(names, 1.0) | weights

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """Run the stage; see `Stage`. Groups leave in the order of their arrival, also with functions.

        Raises:
            InvalidConfig: a component reads text, and no stage has stated a tokenizer.
        """
        if self._reads_text and current().tokenizer is None:
            raise InvalidConfig(
                "tokenizer: expected one, because format markers, characters or functions read text, got none: have "
                "the source state it, or give it to drive(…, tokenizer=…)"
            )
        if self.components:
            await self._run_concurrently(inbox, outbox)
            return
        most = (
            1 if self._reads_text else MAX_CHUNK
        )  # decoding takes longer than numpy calls: a stack of groups saves no time
        async for groups in receive_chunks(inbox, most):
            turns = [texts for group in groups for texts in await self._turns(group)] if self._reads_text else []
            shaped = self._shaped(groups, turns, {})
            del groups  # they may occupy a producer's slots until the next ones arrive
            await send_all(outbox, shaped)

    # -- rewards -------------------------------------------------------------------------------------------------

    def _shaped(
        self, groups: Sequence[TrajectoryGroup], turns: Turns, judged: Mapping[str, NDArray[np.float64]]
    ) -> list[TrajectoryGroup]:
        """Return `groups` with shaped rewards, from their text, if it is read, and the values of the functions [B]."""
        if not judged and self.config == UNCHANGED:
            return list(groups)
        stack = GroupStack(groups)
        scores = stack.rewards()
        shaped = combined(scores, stack.noise(), {**self._components(stack, turns), **judged}, self.config)
        zeros = np.zeros(len(scores))
        parts = {name: stack.reward_parts(name, zeros) + part for name, part in shaped.parts.items()}
        parts["score"] = stack.reward_parts("score", scores)  # set by an earlier bridge, if there is one
        return stack.with_rewards(shaped.rewards, shaped.noise, parts)

    def _components(self, stack: GroupStack, turns: Turns) -> dict[str, NDArray[np.float64]]:
        """Return the configured components, [B] each, before any correction."""
        config = self.config
        components: dict[str, NDArray[np.float64]] = {}
        if config.format_markers:
            components["format_markers"] = np.array([reward_of_format(texts, config) for texts in turns], np.float64)
        if (bounty := config.length_bounty) is not None:
            by_character = bounty.unit == "character"
            lengths = [sum(map(len, texts)) for texts in turns] if by_character else stack.completion_lengths()
            components["length_bounty"] = bounty_of_lengths(np.asarray(lengths, np.int64), bounty)
        if config.overlong is not None:
            components["overlong"] = penalty_of_lengths(stack.completion_lengths(), config.overlong)
        return components

    @property
    def _only_functions(self) -> bool:
        config = self.config
        return not config.format_markers and config.length_bounty is None and config.overlong is None

    # -- text --------------------------------------------------------------------------------------------------------

    @property
    def _reads_text(self) -> bool:
        bounty = self.config.length_bounty
        return (
            bool(self.config.format_markers)
            or (bounty is not None and bounty.unit == "character")
            or any(component.reads_text for component in self.components)
        )

    async def _turns(self, group: TrajectoryGroup) -> Turns:
        tokenizer = current().tokenizer
        if len(group.tokens) < DECODE_IN_THREAD_TOKENS:
            return turns_of(group, tokenizer)
        return await anyio.to_thread.run_sync(call_user, turns_of, group, tokenizer)

    # -- functions ---------------------------------------------------------------------------------------------------

    async def _run_concurrently(
        self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]
    ) -> None:
        """Start a group while the functions have capacity for more calls; send in order."""
        queued: deque[tuple[anyio.Event, int]] = deque()
        """For each group, set once it has left, and its number of rollouts."""
        with unwrap_first():
            async with AsyncExitStack() as stack:
                calls = {each.name: await self._open(each, stack) for each in self.components}
                stack.enter_context(current().watch_loop(max(each.reward_timeout_s for each in self.components)))
                tasks = await stack.enter_async_context(anyio.create_task_group())
                async for group in inbox:
                    before, left = queued[-1][0] if queued else None, anyio.Event()
                    queued.append((left, group.rollouts))
                    tasks.start_soon(await_user, self._judge_and_send, group.owned(), outbox, calls, before, left)
                    del group
                    while self._all_busy([size for _, size in queued]):
                        await queued.popleft()[0].wait()

    async def _open(self, component: RewardComponent, stack: AsyncExitStack) -> Calls:
        function = await stack.enter_async_context(open_user(component.open))
        return stack.enter_context(closing(Calls(component, function)))

    def _all_busy(self, sizes: Sequence[int]) -> bool:
        """Return whether groups of `sizes` rollouts fill the capacity of every component."""
        return all((len(sizes) if each.batched else sum(sizes)) >= each.concurrency for each in self.components)

    async def _judge_and_send(
        self,
        group: TrajectoryGroup,
        outbox: SendChannel[TrajectoryGroup],
        calls: Mapping[str, Calls],
        before: anyio.Event | None,
        left: anyio.Event,
    ) -> None:
        """Send `group` with its rewards, once the group `before` it has left."""
        turns = await self._turns(group) if self._reads_text else [[] for _ in range(group.rollouts)]
        outcomes = await self._judged(group, turns, calls)
        keep = _kept(group, outcomes, without_value=self._only_functions and "row" in group.meta)
        if keep.all():
            shaped = self._shaped([group], turns, _values(outcomes, keep))
        elif keep.any():
            kept_turns = [turns[r] for r in np.flatnonzero(keep).tolist()]
            shaped = self._shaped(
                [group.select(keep[group.rollout_of_sequence()])], kept_turns, _values(outcomes, keep)
            )
        else:
            shaped = []
        if before is not None:
            await before.wait()
        await send_all(outbox, shaped)
        left.set()

    async def _judged(
        self, group: TrajectoryGroup, turns: Turns, calls: Mapping[str, Calls]
    ) -> dict[str, list[Outcome]]:
        """Return the value of each function for each rollout; 0 for right completions, with a fallback."""
        starts = group.rollout_starts()
        judged = np.flatnonzero(failed(group.rewards[starts].astype(np.float64), self.config)).tolist()
        outcomes: dict[str, list[Outcome]] = {each.name: [0.0] * len(starts) for each in self.components}
        last = group.rollout_ends().tolist()

        async def judge(component: RewardComponent) -> None:
            inputs = [_input(group, last[r], turns[r] if component.reads_text else []) for r in judged]
            for r, value in zip(judged, await calls[component.name].values(inputs), strict=True):
                outcomes[component.name][r] = value

        async with anyio.create_task_group() as tasks:
            for component in self.components:
                tasks.start_soon(await_user, judge, component)
        return outcomes


def _input(group: TrajectoryGroup, s: int, turns: Sequence[str]) -> RewardInput:
    return RewardInput(
        trajectory=group[s],
        score=float(group.rewards[s]),
        text="\n".join(turns),
        turns=tuple(turns),
        meta=group.meta,
    )


def _kept(
    group: TrajectoryGroup, outcomes: Mapping[str, Sequence[Outcome]], *, without_value: bool
) -> NDArray[np.bool_]:
    """Return [R] true on rollouts that are sent; drop the others.

    Args:
        group: of R rollouts.
        outcomes: for each component, [R]. A rollout with a failure ends as failed.
        without_value: whether a rollout without an applicable component ends as filtered: its prompt has no score.
    """
    lost: dict[tuple[EndState, str], list[TrajectoryId]] = {}
    keep, ids_of_rows = np.ones(group.rollouts, np.bool_), group.ids
    for r, first in enumerate(group.rollout_starts().tolist()):
        id_ = ids_of_rows[first]
        of_rollout = [values[r] for values in outcomes.values()]
        failure = next((outcome for outcome in of_rollout if isinstance(outcome, RewardFailure)), None)
        if failure is not None:
            lost.setdefault(("failed", failure.reason), []).append(id_)
        elif without_value and all(outcome is None for outcome in of_rollout):
            lost.setdefault(("filtered", "no reward function applies"), []).append(id_)
        else:
            continue
        keep[r] = False
    for (state, reason), ids in lost.items():
        drop(ids, state, reason)
    return keep


def _values(outcomes: Mapping[str, Sequence[Outcome]], keep: NDArray[np.bool_]) -> dict[str, NDArray[np.float64]]:
    """Return the values of each function for the rollouts in `keep`."""
    places = np.flatnonzero(keep).tolist()
    return {name: np.array([values[r] or 0.0 for r in places], np.float64) for name, values in outcomes.items()}


def turns_of(group: TrajectoryGroup, tokenizer: Tokenizer) -> Turns:
    """Return the text of each rollout, turn by turn, without the tokens that end one; branch after branch."""
    turns: Turns = [[] for _ in range(group.rollouts)]
    for row, rollout in zip(group, group.rollout_of_sequence().tolist(), strict=True):
        turns[rollout] += [_decoded(row.tokens[a:b], tokenizer) for a, b in _runs(row.loss_mask)]
    return turns


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the runs of true values in `mask`, as half-open spans."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _decoded(tokens: NDArray[np.int32], tokenizer: Tokenizer) -> str:
    ends = end_ids_of(tokenizer)
    return tokenizer.decode([token for token in tokens.tolist() if token not in ends])
