"""The facts that a stage may state about itself: `Pipeline.check` and the run read them here and nowhere else.

A stage states them by one optional method:

    def stage_info(self) -> StageInfo:
        return StageInfo(takes_at_most_tokens=self.max_tokens)

A misspelled field is a type error. The use of the facts is left to others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from ..util.user_code import call_user
from .assignment import Assign
from .stage_node import StageNode


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInfo:
    """Facts about a stage, all optional."""

    name: str | None = None
    """Its name, where that of its class is too general."""
    receives: type[Any] | None = None
    """The class of the records that it receives, where its inbox has no annotation for it."""
    output_type: type[Any] | None = None
    """The class of the records that it sends, where its outbox has no annotation for it."""
    sends_at_most_tokens: int | None = None
    """The most tokens of a group that it sends."""
    takes_at_most_tokens: int | None = None
    """The most tokens of a group that it can process."""
    waits_for: int | None = None
    """The number of trajectories that it must receive before it sends any, or before a sink takes an optimizer step."""
    max_steps: int | None = None
    """The optimizer step at which a sink ends the run; None where it has no such step."""
    commits: bool = False
    """True if a sink commits what is trained; any other may do anything with its records."""
    keeps_groups: int = 0
    """The number of groups that it holds, not copied, before it sends any."""
    sees_everything: bool = False
    """True where it must receive every record, so that it cannot run in several processes."""
    follows_trajectories: bool = False
    """True where it asks the ledger of the run about the end of trajectories that it has sent, so that it cannot run in
    a worker."""
    assign: Assign | None = None
    """Of a source that can assign prompts to any number of workers, by `Context.assignments`."""
    groups_at_once: int = 1
    """Of a source that can `assign`, the number of groups that one worker samples at a time."""
    tokenizers: tuple[Any, ...] | None = None
    """The tokenizers that it uses, or their `TokenizerIdentity`. Empty where it uses an unknown one; None if it uses no
    tokenizer. The first one of a chain is that of the pipeline: `Context.tokenizer`."""
    needs_tokenizer: bool = False
    """True where it needs to know the tokenizer of the tokens that it receives."""
    saved: Mapping[str, Any] = field(default_factory=dict)
    """Objects whose state the checkpoints of a sink hold, by name; stages may be among them."""
    saves_at_end: bool = False
    """True of a sink that writes a checkpoint when its stream ends."""
    evaluation: object | None = None
    """The evaluation that a source does; the pipeline hands it to its sink."""
    needs_columns: tuple[str, ...] = ()
    """The columns that it needs to process a record: `("teacher_ids", "teacher_logprobs")`."""
    fills_columns: tuple[str, ...] | None = None
    """The columns that its records may have besides those that it receives. None where they are not known: then any
    column may be among them."""
    nodes: tuple[StageNode, ...] = ()
    """The stages of a fragment, each with its placement."""


@runtime_checkable
class DescribesItself(Protocol):
    """A stage that states facts about itself."""

    def stage_info(self) -> StageInfo:
        """Return the facts as they stand now."""
        ...


@runtime_checkable
class HasTokenizer(Protocol):
    """A policy or a trainer that knows its tokenizer."""

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer, its `TokenizerIdentity`, or None."""
        ...


@runtime_checkable
class NeedsColumns(Protocol):
    """A trainer or a loss that knows the optional columns of a batch that it needs."""

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return their names."""
        ...


def info_of(stage: object) -> StageInfo:
    """Return the facts that `stage` states about itself; the defaults for one without any, and for a class."""
    if isinstance(stage, DescribesItself) and not isinstance(stage, type):
        return call_user(stage.stage_info)
    return StageInfo()


def stated_tokenizers(stages: Iterable[object]) -> Iterator[Any]:
    """Yield the tokenizers that stages state, in their order, those within fragments included."""
    for info in map(info_of, stages):
        yield from stated_tokenizers(node.stage for node in info.nodes)
        yield from info.tokenizers or ()


def tokenizer_of(*owners: object) -> tuple[Any, ...]:
    """Return the tokenizers that `owners` know: policies, trainers, teachers."""
    found = (owner.tokenizer for owner in owners if isinstance(owner, HasTokenizer))
    return tuple(tokenizer for tokenizer in found if tokenizer is not None)


def name_of(stage: object) -> str:
    """Return the name that a stage states, or that of its class."""
    return info_of(stage).name or type(stage).__name__


def named(nodes: Iterable[StageNode]) -> tuple[StageNode, ...]:
    """Return the same nodes, with a number appended to names that occur more than once."""
    seen: Counter[str] = Counter()
    distinct: list[StageNode] = []
    for node in nodes:
        name = name_of(node.stage)
        seen[name] += 1
        numbered = name if seen[name] == 1 else f"{name} {seen[name]}"
        distinct.append(replace(node, name=numbered))
    return tuple(distinct)
