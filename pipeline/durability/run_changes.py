"""Compare a continued run with its folder: the configuration that it is given, and facts that its stages state.

    <folder>/config.json                  configuration and facts of the part that began the run
    <folder>/config.step-00000200.json    those of the part that was continued from step 200, where they differ

A part whose steps are all trained again leaves no file, as it leaves no line of metrics; so a checkpoint is compared
with the part that trained it. Knows no checkpoint and no stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
from msgspec import UNSET

from ..accounting.telemetry import get_logger
from ..errors import RunDiffers
from ..graph.stage_node import StageNode
from ..util.json_file import read_json, read_json_or_set_aside, write_json
from ..util.printing import print_line

FIRST = "config.json"
LATER = re.compile(r"config\.step-(\d{8})\.json")

STAGES = "penstock"
"""Key of the facts that stages state, beside the values of the configuration."""

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

LONGEST = 60
"""Characters of a value in a message."""

log = get_logger("penstock.pipeline")


class StageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a stage, to compare a continued run with its folder, as JSON values."""

    fixed: Mapping[str, Any] = {}
    """Facts that change with `allow_changes` alone, such as the identity of the data."""
    options: Mapping[str, Any] = {}
    """Facts that may change, such as a learning rate; a change is printed in a run without a configuration."""


@runtime_checkable
class StatesFacts(Protocol):
    """A stage, or a trainer, that states facts about itself."""

    def facts(self) -> StageFacts:
        """Return the facts. May block, to read files."""
        ...


class Change(NamedTuple):
    """A key whose value differs between two parts of a run."""

    key: str
    """Its path: `algorithm.optimizer.lr`, `reward.functions[0].weight`."""
    before: Any
    """Its value; UNSET where one of the two has no such key, for another version of penstock wrote it."""
    now: Any

    @property
    def is_known(self) -> bool:
        """Return whether both parts have the key."""
        return UNSET not in (self.before, self.now)

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} → {_shown(self.now)}"


class RunPart:
    """A part of a run, from one start to the next: its configuration, and the facts of its stages. Making it blocks."""

    def __init__(self, config: Mapping[str, Any], nodes: Sequence[StageNode]) -> None:
        facts = facts_of(nodes)
        self._values = plain({**config, STAGES: facts} if facts else config)
        self._compares_options = not config

    def compare(self, folder: Path, step: int, *, allow_changes: bool) -> None:
        """Print and log all changes since the part that trained `step`.

        Raises:
            RunDiffers: fixed facts have changed, and `allow_changes` is false.
        """
        before = config_before(folder, step)
        if before is None:
            return
        fixed = _changes_of_facts(before, self._values, "fixed")
        options = _changes_of_facts(before, self._values, "options") if self._compares_options else []
        refuse(fixed, folder, step, allow_changes=allow_changes)
        for change in [*changes_between(without_facts(before), without_facts(self._values)), *options, *fixed]:
            print_line(f"continued from step {step} with {change}")
            log.info("run_changed", step=step, key=change.key, before=change.before, now=change.now)

    def write(self, folder: Path, step: int) -> None:
        """Write the file of the part that begins at `step`, unless it is like the part before it. Blocks."""
        path = folder / (f"config.step-{step:08d}.json" if step else FIRST)
        differs = self._values != (config_before(folder, step) or {})
        if differs:
            write_json(path, self._values)
        for later, begins in _later_parts(folder):
            if begins > step or (begins == step and not differs):
                later.unlink()


def facts_of(nodes: Sequence[StageNode]) -> dict[str, StageFacts]:
    """Return the facts that stages state, by their names. Blocks."""
    return {node.name: _facts_of(node) for node in nodes if isinstance(node.stage, StatesFacts)}


def _facts_of(node: StageNode) -> StageFacts:
    facts: StageFacts = node.stage.facts()
    if node.max_lag is None:
        return facts
    return msgspec.structs.replace(facts, options={**facts.options, "max_lag": node.max_lag})


def config_before(folder: Path, step: int) -> dict[str, Any] | None:
    """Return the configuration of the part of a run in `folder` that trained `step`; None if it is unknown. Blocks."""
    parts = [path for path, begins in parts_of(folder) if begins < step]
    consequence = "the run is not compared with what it was"
    return read_json_or_set_aside(parts[-1], dict[str, Any], consequence=consequence) if parts else None


def parts_of(folder: Path) -> list[tuple[Path, int]]:
    """Return the file of each part of the run in `folder`, the first one's first, and the step where it begins."""
    return [(folder / FIRST, 0), *_later_parts(folder)]


def parts_of_run(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the configuration of each part of a run, oldest first, with the step where it begins. Blocks.

    Raises:
        FileNotFoundError: no run in a folder was there.
        FileDamaged: a file is not as it was written.
    """
    remedy = "restore it, or train that run again in another folder"
    return [(begins, read_json(path, dict[str, Any], remedy=remedy)) for path, begins in parts_of(folder)]


def changes_between(before: Any, now: Any, key: str = "") -> Iterator[Change]:
    """Yield the differences of two JSON values, each with the path of the innermost value that differs.

    >>> [str(change) for change in changes_between({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})]
    ['a.c: 2 → 3']
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping) and before and now:
        for name in {**before, **now}:
            inner = f"{key}.{name}" if key else str(name)
            yield from changes_between(before.get(name, UNSET), now.get(name, UNSET), inner)
    elif _are_lists_of_mappings(before, now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            yield from changes_between(*pair, f"{key}[{index}]")
    elif before != now:
        yield Change(key, before, now)


def refuse(changes: Iterable[Change], folder: Path, step: int, *, allow_changes: bool) -> None:
    """Raise an error if there are `changes`, and they are not allowed.

    Raises:
        RunDiffers: naming each key with both values.
    """
    if (found := [str(change) for change in changes]) and not allow_changes:
        raise RunDiffers(
            f"expected the run in {folder} as it was until step {step}, got other values of {'; '.join(found)}: take "
            f"another folder for another run, or allow_changes=true to continue this one with them"
        )


def without_facts(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in a result of `config_before`."""
    return {key: value for key, value in part.items() if key != STAGES}


def plain(value: Any) -> Any:
    """Return `value` as JSON has it: with lists for tuples and arrays, and text for values that JSON cannot hold."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_plain))


def text_of(value: object) -> str:
    """Return the repr of `value` without addresses: they differ from process to process."""
    return ADDRESS.sub("", repr(value))


def _plain(value: Any) -> Any:
    return value.tolist() if callable(getattr(value, "tolist", None)) else text_of(value)


def _changes_of_facts(before: Mapping[str, Any], now: Mapping[str, Any], kind: str) -> list[Change]:
    """Return the changes of facts that are known of both parts."""
    earlier, present = ({name: each[kind] for name, each in part.get(STAGES, {}).items()} for part in (before, now))
    return [change for change in changes_between(earlier, present) if change.is_known]


def _are_lists_of_mappings(before: Any, now: Any) -> bool:
    both = isinstance(before, list) and isinstance(now, list)
    return both and len(before) == len(now) and all(isinstance(each, Mapping) for each in [*before, *now])


def _later_parts(folder: Path) -> list[tuple[Path, int]]:
    """Return the files of the parts that were continued, oldest first, each with the step where it begins."""
    found = ((path, LATER.fullmatch(path.name)) for path in folder.iterdir())
    return sorted(((path, int(name[1])) for path, name in found if name), key=lambda each: each[1])


def _shown(value: Any) -> str:
    text = "absent" if value is UNSET else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
