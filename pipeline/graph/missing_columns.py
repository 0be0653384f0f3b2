"""Find the stages of a chain that need a column not filled by any stage before them.

The facts come from `StageInfo.needs_columns` and `fills_columns`. Where a stage does not state its own, any column may
be there, and the stages after it are not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..._schemas.group import GROUP_RULES
from .stage_info import info_of
from .stage_node import StageNode

REMEDIES = {
    "advantages": "put an AdvantageNormalizer before it",
    "ref_logprobs": "put a TorchReference before it, or give the trainer a reference",
    "teacher_ids": "put a Teacher before it",
    "teacher_logprobs": "put a Teacher before it",
    "routed_experts": "sample with TorchPolicy(routed_experts=True), or HttpPolicy(routed_experts=…)",
    "token_rewards": "set turn_rewards=True of SourceEnv, or put KLReward(…, level='token') before it",
    "values": "put a stage of your own with a critic before it, or take advantages that need no critic, as grpo",
}
"""The remedies for absent columns, of those that penstock fills or reads."""

ALWAYS = frozenset(name for name, rule in GROUP_RULES.items() if rule.required)
"""The columns that every record has."""


def missing_columns(nodes: Sequence[StageNode]) -> Iterator[str]:
    """Yield a problem for each stage that lacks a column, and for each name that no column has."""
    stages = list(_flat(nodes))
    known: set[str] | None = set(ALWAYS)
    for node in stages:
        info = info_of(node.stage)
        yield from _unknown_names(node.name, [*info.needs_columns, *(info.fills_columns or ())])
        if known is not None:
            yield from _absent(node.name, [name for name in info.needs_columns if name not in known], stages)
        known = None if known is None or info.fills_columns is None else known.union(info.fills_columns)


def _flat(nodes: Sequence[StageNode]) -> Iterator[StageNode]:
    """Yield the stages in the order of the stream, those of a fragment in its place."""
    for node in nodes:
        inner = info_of(node.stage).nodes
        yield from _flat(inner) if inner else (node,)


def _unknown_names(stage: str, names: Sequence[str]) -> Iterator[str]:
    if unknown := [name for name in names if name not in GROUP_RULES]:
        columns = ", ".join(name for name in GROUP_RULES if name not in ALWAYS)
        yield f"{stage}: StageInfo: expected columns of a record, {columns}, got {', '.join(unknown)}"


def _absent(stage: str, names: Sequence[str], stages: Sequence[StageNode]) -> Iterator[str]:
    """Yield the problems of absent columns; those with the same remedy are one."""
    by_remedy: dict[str, list[str]] = {}
    for name in (each for each in names if each in GROUP_RULES):
        by_remedy.setdefault(_remedy(name, stages), []).append(name)
    for remedy, together in by_remedy.items():
        columns = f"column{'s' if len(together) > 1 else ''} {' and '.join(together)}"
        yield f"{stage}: it needs the {columns}, which no stage before it fills: {remedy}"


def _remedy(name: str, stages: Sequence[StageNode]) -> str:
    """Return the remedy for an absent column: move the stage that fills it too late, or add one."""
    later = next((node.name for node in stages if name in (info_of(node.stage).fills_columns or ())), None)
    if later is not None:
        return f"put {later} before it"
    return REMEDIES.get(name, "put a stage of your own that fills it before it")
