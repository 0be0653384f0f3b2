"""Find problems of a chain before anything starts: `problems` lists all of them, each with a remedy.

The facts that are compared come from `stage_info()` of each stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..._schemas import InvalidConfig, TokenizerIdentity, TrainBatch, TrajectoryGroup, tokenizer_identity
from ..._schemas.numbers import whole_number
from ..._schemas.tokenizer import disagreements
from ..accounting.telemetry import get_logger
from ..errors import MissingExtra
from ..util.interpreter import check_interpreter
from ..util.pickling import needs_main, pickled
from .misplaced import written
from .missing_columns import missing_columns
from .placement import Here, Joining, Processes, Remote
from .record_types import RecordTypes, never_fits, output_type, record_types, sent_along, type_name
from .stage_info import info_of, stated_tokenizers
from .stage_node import StageNode

log = get_logger("penstock.check")

SIZES = ("sends_at_most_tokens", "takes_at_most_tokens", "waits_for", "keeps_groups")
"""The fields of `StageInfo` that are numbers."""

BYTES_PER_TOKEN = 9
"""The least that a sampled token takes: its id, its place in the loss mask, its behavior log-probability."""


def problems(nodes: Sequence[StageNode]) -> list[str]:
    """Return all problems of a chain."""
    found = list(_of_chain(nodes))
    identities = _identities(nodes)
    _log_unknown_tokenizers(nodes, {name for name, _ in identities})
    return [
        *found,
        *_of_state(nodes),
        *missing_columns(nodes),
        *_of_tokenizers(nodes),
        *disagreements(identities),
    ]


@dataclass(frozen=True, slots=True)
class InOtherInterpreter:
    """A stage whose workers run in another interpreter."""

    node: StageNode
    python: str
    start_timeout_s: float


def in_other_interpreters(nodes: Sequence[StageNode]) -> list[InOtherInterpreter]:
    """Return the stages whose workers run in other interpreters, those within fragments included."""
    found: list[InOtherInterpreter] = []
    for node in nodes:
        found += in_other_interpreters(info_of(node.stage).nodes)
        if isinstance(node.on, Processes) and node.on.python is not None:
            found.append(InOtherInterpreter(node, node.on.python, node.on.start_timeout_s))
    return found


def interpreter_problems(stages: Sequence[InOtherInterpreter]) -> list[str]:
    """Return the problems of workers in other interpreters, which are started to see what they have. Blocks."""
    return [
        f"{each.node.name}: python: {problem}"
        for each in stages
        for problem in _of_interpreter(each.node.stage, each.python, each.start_timeout_s)
    ]


def _of_interpreter(stage: object, python: str, timeout_s: float) -> Iterator[str]:
    if needs_main(pickled(stage)):
        yield "expected functions and classes of modules, got some of the script, which it does not import"
    try:
        check_interpreter(python, timeout_s, needs="gateway")
    except (InvalidConfig, MissingExtra) as error:
        yield str(error).removeprefix("python: ")
    except TimeoutError:
        yield f"expected {python} to answer within {timeout_s:g} s, got no answer"


def _of_chain(nodes: Sequence[StageNode]) -> Iterator[str]:
    """Find the problems of each stage and each edge, those within fragments included."""
    for position, node in enumerate(nodes):
        yield from _of_stage(node, first=position == 0)
        yield from _of_chain(info_of(node.stage).nodes)
    types = [record_types(node.stage) for node in nodes]
    yield from _of_types(nodes, types)
    group_tokens: int | None = None
    for (before, after), (_, sent) in zip(pairwise(nodes), types, strict=False):
        group_tokens = _hint(before.stage, "sends_at_most_tokens") or group_tokens
        yield from _of_edge(before, after)
        if sent is not TrainBatch:
            yield from _of_sizes(before, after, group_tokens)


def _of_types(nodes: Sequence[StageNode], types: Sequence[RecordTypes]) -> Iterator[str]:
    """Find the edges whose two stages have no record type in common, by their annotations."""
    sent_by = sent_along(types)
    for (before, after), sent, (received, _) in zip(pairwise(nodes), sent_by, types[1:], strict=False):
        if never_fits(sent, received):
            yield (
                f"{before.name} → {after.name}: {before.name} sends {type_name(sent)}, and {after.name} receives "
                f"{type_name(received)}: {_line_instead(before.stage, after.stage)}"
            )


def _line_instead(before: object, after: object) -> str:
    """Return the line to write for two stages that do not fit: the other order if that fits, or a stage between."""
    first, second = record_types(before), record_types(after)
    if None not in (*first, *second) and not never_fits(second.sent, first.received):
        return f"write .then({written(after)}).then({written(before)})"
    if first.sent is TrajectoryGroup and second.received is TrainBatch:
        return f"write .then(Batcher(max_tokens=…)) before {written(after)}"
    return f"put a stage between them that receives {type_name(first.sent)} and sends {type_name(second.received)}"


def _of_tokenizers(nodes: Sequence[StageNode], missing: str = "no stage before it states one") -> Iterator[str]:
    """Find the stages that need the tokenizer of the tokens and do not get it, because of `missing`; "" if known."""
    for node in nodes:
        info = info_of(node.stage)
        reason = "a worker that joins is not sent one" if isinstance(node.on, Joining) else missing
        if info.nodes:
            yield from _of_tokenizers(info.nodes, reason)
        elif info.needs_tokenizer and reason:
            yield (
                f"{node.name}: expected the tokenizer of the tokens that it receives, and {reason}: state one before "
                f"it, by SourceEnv(…, tokenizer) or StageInfo(tokenizers=…), and run it here, in processes or on Ray"
            )
        if any(True for _ in stated_tokenizers([node.stage])):
            missing = ""


def _log_unknown_tokenizers(nodes: Sequence[StageNode], known: Collection[str]) -> None:
    """Log where the tokenizers of source and trainer cannot be compared because one of them has no identity."""
    first, last = nodes[0], nodes[-1]
    source, trainer = _any_of(first, known), _any_of(last, known)
    if source != trainer and info_of(last.stage).tokenizers is not None:
        unknown_to = last.name if source else first.name
        log.info("tokenizers_not_compared", source=first.name, trainer=last.name, unknown_to=unknown_to)


def _any_of(node: StageNode, names: Collection[str]) -> bool:
    return node.name in names or any(_any_of(inner, names) for inner in info_of(node.stage).nodes)


def _of_state(nodes: Sequence[StageNode]) -> Iterator[str]:
    kept = info_of(nodes[-1].stage).saved
    for node in nodes:
        parts = [node.stage, *(inner.stage for inner in info_of(node.stage).nodes)]
        for name in (name for name, each in kept.items() if node.remote and any(each is part for part in parts)):
            yield (
                f"{node.name}: checkpoints keep its state as {name!r}, but it runs in "
                f"{node.on.__class__.__name__.lower()} and gathers there: checkpoints would hold the state of a stage "
                f"that has received no record; place it on here()"
            )


def _identities(nodes: Sequence[StageNode]) -> list[tuple[str, TokenizerIdentity]]:
    """Return the identity of every tokenizer that has one, with its stage; a shared tokenizer is read once."""
    known: dict[int, TokenizerIdentity] = {}
    found: list[tuple[str, TokenizerIdentity]] = []
    for name, tokenizer in _tokenizers(nodes):
        if isinstance(tokenizer, TokenizerIdentity) or hasattr(tokenizer, "get_vocab"):
            known[id(tokenizer)] = known.get(id(tokenizer)) or tokenizer_identity(tokenizer)
            found.append((name, known[id(tokenizer)]))
    return found


def _tokenizers(nodes: Sequence[StageNode]) -> Iterator[tuple[str, Any]]:
    for node in nodes:
        yield from _tokenizers(info_of(node.stage).nodes)
        for tokenizer in info_of(node.stage).tokenizers or ():
            yield node.name, tokenizer


def _of_stage(node: StageNode, *, first: bool) -> Iterator[str]:
    run = getattr(node.stage, "run", None)
    if not inspect.iscoroutinefunction(run):
        ends = "outbox" if first else "inbox, outbox"
        yield f"{node.name}: expected a stage with `async def run(self, {ends})`, got {node.stage!r}"
    if not isinstance(node.on, Here):
        yield from _of_remote(node, node.on)
    for name in SIZES:
        if (value := getattr(info_of(node.stage), name)) is not None and _hint(node.stage, name) is None:
            yield f"{node.name}: {name}: expected a whole number, got {value!r}"


def _of_remote(node: StageNode, on: Remote) -> Iterator[str]:
    if any(inner.remote for inner in info_of(node.stage).nodes):
        yield f"{node.name}: it has processes within processes; place either the whole fragment there, or its parts"
    if info_of(node.stage).sees_everything and on.count > 1:
        yield (
            f"{node.name}: it has to see every record, and in {on.count} processes each would see some: place it on "
            f"here() or processes(1), or in one fragment with its source"
        )
    for stage in (node, *info_of(node.stage).nodes):
        if info_of(stage.stage).follows_trajectories:
            yield (
                f"{stage.name}: it asks the ledger of the run what became of trajectories that it has sent, and a "
                f"worker has none: place it on here()"
            )
    record = output_type(node.stage)
    if record is not None and record not in {TrajectoryGroup, TrainBatch}:
        yield (
            f"{node.name}: it runs in {node.on.__class__.__name__.lower()} and sends {record.__name__}, but between "
            f"processes only TrajectoryGroup and TrainBatch travel"
        )
    if isinstance(node.on, Joining):
        if record is TrainBatch:
            yield f"{node.name}: expected a stage that sends TrajectoryGroup, for its workers join, got TrainBatch"
        return
    try:
        pickled(node.stage)
    except Exception as error:  # noqa: BLE001 (pickling runs the stage's own code, which may raise anything)
        yield (
            f"{node.name}: expected a stage that can be pickled to its process, got {error!r}; give it functions of a "
            f"module, by name, and open files, models and sockets in `run`"
        )


def _of_edge(before: StageNode, after: StageNode) -> Iterator[str]:
    for name in ("capacity", "capacity_bytes"):
        if (value := getattr(after, name)) is not None:
            try:
                whole_number(name, value)
            except InvalidConfig as error:
                yield f"{before.name} → {after.name}: {error}"
    if (before.remote or after.remote) and after.capacity == 1:
        yield (
            f"{before.name} → {after.name}: expected a capacity of at least 2 between processes, got 1: a stage that "
            f"loops over its inbox holds one record while it asks for the next"
        )


def _of_sizes(before: StageNode, after: StageNode, group_tokens: int | None) -> Iterator[str]:
    edge = f"{before.name} → {after.name}"
    accepted = _hint(after.stage, "takes_at_most_tokens")
    if accepted is not None and group_tokens is not None and group_tokens > accepted:
        yield (
            f"{edge}: a group may hold {group_tokens} tokens, and {after.name} takes at most {accepted}: raise its "
            f"token budget, or sample smaller groups or shorter completions"
        )
    remote = before.remote or after.remote
    budget = after.remote_capacity_bytes if remote else after.capacity_bytes
    at_once = 2 if remote else 1  # a stage holds one record, which is not copied, while it asks for the next
    if budget is not None and group_tokens is not None and at_once * group_tokens * BYTES_PER_TOKEN > budget:
        yield (
            f"{edge}: a group may take {group_tokens * BYTES_PER_TOKEN} bytes ({group_tokens} tokens), and the edge "
            f"holds {budget}: raise capacity_bytes{' to twice as much' if remote else ''}"
        )
    keeps = _hint(after.stage, "keeps_groups") or 0
    if not isinstance(before.on, Here) and keeps > (credit := before.on.count * after.remote_capacity):
        yield (
            f"{edge}: {after.name} keeps {keeps} groups before it sends, and its senders have credit for {credit}: "
            f"they would wait for each other; raise capacity"
        )


def _hint(stage: Any, name: str) -> int | None:
    if (value := getattr(info_of(stage), name)) is None:
        return None
    try:
        return whole_number(name, value, least=0)
    except InvalidConfig:
        return None
