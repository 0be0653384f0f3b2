"""What an Atropos environment sends as a `TrajectoryGroup`, and back, field by field.

`masks` say where a group trains, by the token, and by −100 where it does not. `inference_logprobs` are 1.0 there, which
no log-probability is; a column of a group is 0 there. `scores` are rewards. A teacher's candidates describe the token
they stand at, as ours do, some for each token; columns are as wide as the token with the most, and −1 where a token
has fewer. Everything that is no column goes into `meta`, under the names in `META`, as it came.

Axes: S sequences, N tokens of all of them, K candidates of a teacher.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....schemas import Array, InvalidRecord, TrajectoryGroup
from ....schemas.columns import freeze
from ...teachers.candidates import ROUNDING, Candidates
from .contract import NO_LOGPROB, UNTRAINED, ScoredData

__all__ = ["META", "as_if_sent", "from_group", "to_group"]

META = ("env_id", "messages", "overrides", "group_overrides", "generation_params", "images")
"""Fields of the contract that are kept in `meta`. Lists over sequences are indexed by repetition id."""

TEMPERATURES = "temperatures"
"""Key of `meta`, where the sender says anything of temperatures: at which each sequence is to be scored."""

TRAINS_FIRST = "trains_first"
"""Key of `meta`: repetition ids whose `masks` held the first token too. Nothing predicts it, so it never trains."""


def to_group(
    scored: ScoredData, *, env: str, instance_id: str, policy_version: int, candidates: int | None = None
) -> TrajectoryGroup:
    """`scored` as a group.

    >>> scored = ScoredData(tokens=[[5, 6]], masks=[[-100, 6]], scores=[1.0], inference_logprobs=[[1.0, -0.5]])
    >>> to_group(scored, env="math", instance_id="0", policy_version=3).behavior_logprobs.tolist()
    [0.0, -0.5]

    Args:
        scored: what was sent.
        env: name of the environment.
        instance_id: name of the prompt, which Atropos has none for.
        policy_version: of all its tokens, which Atropos does not tell.
        candidates: width of the teacher's columns, for groups of one width fit into one batch; the token itself and
            the likeliest of more are kept. None for as many as there are.

    Raises:
        InvalidRecord: naming the field, what was expected and what came. It is a 422.
    """
    lengths = np.fromiter(map(len, scored.tokens), np.int64)
    offsets = np.append(0, lengths.cumsum())
    tokens = _ints("tokens", scored.tokens)
    mask = _trained(tokens, _ints("masks", scored.masks), offsets)
    first = offsets[:-1][lengths > 0]
    trains_first = np.flatnonzero(lengths)[mask[first]].tolist()
    mask[first] = False
    columns: dict[str, Any] = {}
    if scored.inference_logprobs is not None:
        columns["behavior_logprobs"] = _logprobs(
            _floats("inference_logprobs", scored.inference_logprobs), mask, offsets
        )
    for name in ("advantages", "ref_logprobs"):
        if (rows := getattr(scored, name)) is not None:
            columns[name] = _floats(name, rows)
    if scored.distill_token_ids is not None and scored.distill_logprobs is not None:
        told = _candidates(scored.distill_token_ids, scored.distill_logprobs)
        columns["teacher_ids"], columns["teacher_logprobs"] = _teacher(told, tokens, candidates)
    return TrajectoryGroup.build(
        env=env,
        instance_id=instance_id,
        tokens=tokens,
        offsets=offsets,
        loss_mask=mask,
        rewards=_floats("scores", [scored.scores]),
        policy_versions=np.full(len(lengths), policy_version, np.int64),
        meta=_meta(scored, trains_first),
        **columns,
    )


def as_if_sent(
    group: TrajectoryGroup, *, env: str, policy_version: int, candidates: int | None = None
) -> TrajectoryGroup:
    """A copy of `group` in private memory, as `to_group` would have made it; for groups that come decoded.

    Args:
        group: made by `to_group` in another process, or by anybody else.
        env: name of the environment.
        policy_version: that is now; those of the group are no later ones.
        candidates: as in `to_group`.

    Raises:
        InvalidRecord: its candidates are none.
    """
    columns = {name: column.copy() for name, column in group.columns().items()}
    columns["policy_versions"] = np.minimum(group.policy_versions, policy_version)
    ids, logprobs = group.teacher_ids, group.teacher_logprobs
    if candidates is not None and ids is not None and logprobs is not None and ids.shape[1] != candidates:
        given = ids >= 0
        told = Candidates(given.sum(axis=1), ids[given], logprobs[given])
        columns["teacher_ids"], columns["teacher_logprobs"] = _teacher(told, group.tokens, candidates)
    freeze(columns.values())
    return msgspec.structs.replace(TrajectoryGroup.assemble(group.header(), columns), env=env)


def _meta(scored: ScoredData, trains_first: list[int]) -> dict[str, Any]:
    meta = {name: value for name in META if (value := getattr(scored, name)) is not None}
    if temperatures := _temperatures(scored):
        meta[TEMPERATURES] = temperatures
    if trains_first:
        meta[TRAINS_FIRST] = trains_first
    return meta


def _temperatures(scored: ScoredData) -> list[float]:
    """Of each sequence; none where nothing is said of any. What is said of fewer sequences counts more."""
    said = [scored.generation_params or {}, scored.group_overrides or {}]
    own: list[dict[str, Any]] = scored.overrides or [{} for _ in scored.tokens]
    found = [next((part["temperature"] for part in (one, *said) if "temperature" in part), None) for one in own]
    for sequence, temperature in enumerate(found):
        if temperature is not None and not (isinstance(temperature, int | float) and temperature >= 0):
            raise InvalidRecord(
                f"temperature of sequence {sequence}: expected a number of 0 or more, got {temperature!r}"
            )
    return [float(one or 1.0) for one in found] if {*found} != {None} else []  # 0 is greedy: the model's own logprobs


def _trained(tokens: NDArray[np.int32], masks: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[N] which tokens train."""
    mask: NDArray[np.bool_] = masks != UNTRAINED
    wrong = mask & (masks != tokens)
    if wrong.any():
        at = int(wrong.argmax())
        raise InvalidRecord(
            f"masks{_place(at, offsets)}: expected {UNTRAINED}, or {tokens[at]}, the token that trains, got {masks[at]}"
        )
    return mask


def _logprobs(told: NDArray[np.float32], mask: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.float32]:
    """[N] those of tokens that train, 0 elsewhere."""
    logprobs = np.where(mask, told, np.float32(0))
    if len(logprobs) and logprobs.max() > ROUNDING:
        at = int(logprobs.argmax())
        raise InvalidRecord(
            f"inference_logprobs{_place(at, offsets)}: expected 0 or less where a token trains, got {logprobs[at]:g}: "
            f"{NO_LOGPROB:g} stands where none does, so masks and log-probabilities do not lie side by side"
        )
    return logprobs


def _place(at: int, offsets: NDArray[np.int64]) -> str:
    sequence = int(np.searchsorted(offsets, at, side="right")) - 1
    return f"[{sequence}][{at - int(offsets[sequence])}]"


# -- a teacher's candidates --------------------------------------------------------------------------------------------


def _candidates(ids: Sequence[Sequence[Sequence[int]]], logprobs: Sequence[Sequence[Sequence[float]]]) -> Candidates:
    """Those of all sequences, one token's after another's."""
    try:
        counts, others = (np.fromiter(map(len, chain.from_iterable(rows)), np.int64) for rows in (ids, logprobs))
    except TypeError as error:
        raise InvalidRecord(f"distill_token_ids, distill_logprobs: expected a list for each token ({error})") from None
    if not np.array_equal(counts, others):
        at = int((counts != others).argmax())
        raise InvalidRecord(
            f"distill_logprobs: expected {counts[at]} at token {at} of the group, as in distill_token_ids, "
            f"got {others[at]}"
        )
    return Candidates(
        counts,
        _ints("distill_token_ids", [[*chain.from_iterable(chain.from_iterable(ids))]]),
        _floats("distill_logprobs", [[*chain.from_iterable(chain.from_iterable(logprobs))]]),
    )


def _teacher(
    told: Candidates, tokens: NDArray[np.int32], candidates: int | None
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """[N, K] in the order in which they came; of too many, the token itself and the likeliest."""
    width = int(told.counts.max(initial=0)) if candidates is None else candidates
    wide = told.counts > width
    kept = _trimmed(told, tokens, wide, width) if wide.any() else told
    filled = np.arange(width) < kept.counts[:, None]
    ids, logprobs = np.full(filled.shape, -1, np.int32), np.zeros(filled.shape, np.float32)
    ids[filled], logprobs[filled] = kept.ids, kept.logprobs
    _check_candidates(told, ids)
    logprobs[logprobs > 0] = 0  # by rounding
    return ids, logprobs


def _trimmed(told: Candidates, tokens: NDArray[np.int32], wide: NDArray[np.bool_], width: int) -> Candidates:
    """The same without those that are too many, for the tokens that are `wide` [N]; the others cost no sorting."""
    theirs = np.flatnonzero(wide.repeat(told.counts))
    owner = np.flatnonzero(wide).repeat(told.counts[wide])
    order = np.lexsort((-told.logprobs[theirs], told.ids[theirs] != tokens[owner], owner))
    rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
    kept = np.ones(len(told.ids), np.bool_)
    kept[theirs[order[rank >= width]]] = False
    return Candidates(np.minimum(told.counts, width), told.ids[kept], told.logprobs[kept])


def _check_candidates(told: Candidates, ids: NDArray[np.int32]) -> None:
    if len(told.ids) and told.ids.min() < 0:
        raise InvalidRecord(f"distill_token_ids: expected ids of 0 or more, got {told.ids.min()}")
    if len(told.logprobs) and told.logprobs.max() > ROUNDING:
        raise InvalidRecord(f"distill_logprobs: expected log-probabilities of 0 or less, got {told.logprobs.max():g}")
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        at, rank = np.argwhere(twice)[0]
        raise InvalidRecord(
            f"distill_token_ids: expected each candidate of a token once, got {ordered[at, rank]} more often at token "
            f"{at} of the group"
        )


# -- lists to columns --------------------------------------------------------------------------------------------------


def _ints(name: str, rows: Iterable[Sequence[int]]) -> NDArray[np.int32]:
    return np.frombuffer(_packed(name, rows, "i", "whole numbers of 32 bits"), np.int32)


def _floats(name: str, rows: Iterable[Sequence[float]]) -> NDArray[np.float32]:
    numbers = np.frombuffer(_packed(name, rows, "f", "numbers that float32 can hold"), np.float32)
    if not np.isfinite(numbers).all():
        got = numbers[~np.isfinite(numbers)][0]
        raise InvalidRecord(f"{name}: expected finite numbers that float32 can hold, got {got:g}")
    return numbers


def _packed(name: str, rows: Iterable[Sequence[Any]], kind: str, expected: str) -> bytes:
    """`rows` one after another, as C has them: half the time of `np.array`, and stricter."""
    try:
        return b"".join([struct.pack(f"{len(row)}{kind}", *row) for row in rows])
    except (struct.error, OverflowError, TypeError) as error:
        raise InvalidRecord(f"{name}: expected {expected}, got others: {error}") from None


# -- and back ----------------------------------------------------------------------------------------------------------


def from_group(group: TrajectoryGroup) -> bytes:
    """`group` as JSON of the contract: what an environment would send, with every field, absent ones as null.

    Of a group that comes from elsewhere, the temperature that a SourceEnv notes becomes a generation parameter.
    """
    return msgspec.json.encode(scored_of(group))


def scored_of(group: TrajectoryGroup) -> ScoredData:
    """`group` as an environment holds it before it is sent."""
    meta, mask = group.meta, group.loss_mask
    repetitions = group.repetition_ids.tolist()
    trained = mask.copy()
    trained[group.offsets[:-1][np.isin(repetitions, meta.get(TRAINS_FIRST, []))]] = True
    kept = _kept(meta, repetitions)
    if group.behavior_logprobs is not None:
        kept["inference_logprobs"] = _rows(np.where(mask, group.behavior_logprobs, np.float32(NO_LOGPROB)), group)
    for name in ("advantages", "ref_logprobs"):
        if (column := getattr(group, name)) is not None:
            kept[name] = _rows(column, group)
    if group.teacher_ids is not None and group.teacher_logprobs is not None:
        told = (group.teacher_ids >= 0) & np.isfinite(group.teacher_logprobs)
        kept["distill_token_ids"] = _told(group.teacher_ids, told, group)
        kept["distill_logprobs"] = _told(group.teacher_logprobs, told, group)
    return ScoredData(
        tokens=_rows(group.tokens, group),
        masks=_rows(np.where(trained, group.tokens, np.int32(UNTRAINED)), group),
        scores=group.rewards.tolist(),
        **kept,
    )


def _kept(meta: Mapping[str, Any], repetitions: Sequence[int]) -> dict[str, Any]:
    """What the contract has a name for; what is of every sequence, of those that there are."""
    kept: dict[str, Any] = {name: meta[name] for name in META if name in meta}
    for name, kind in (("messages", list), ("overrides", dict)):
        said = kept.get(name)
        if not (isinstance(said, list) and all(isinstance(one, kind) for one in said)):
            kept.pop(name, None)  # of another meaning
        elif len(said) > max(repetitions, default=0):
            kept[name] = [said[repetition] for repetition in repetitions]
    if "temperature" in meta:
        kept.setdefault("generation_params", {"temperature": meta["temperature"]})
    return kept


def _rows(column: Array, group: TrajectoryGroup) -> list[list[Any]]:
    """A column over tokens as one list a sequence."""
    bounds = group.offsets.tolist()
    flat = column.tolist()
    return [flat[first:last] for first, last in pairwise(bounds)]


def _told(column: Array, told: NDArray[np.bool_], group: TrajectoryGroup) -> list[list[list[Any]]]:
    """What is `told` [N, K] of a column, as lists of each token's own length."""
    ends = told.sum(axis=1).cumsum().tolist()
    flat = column[told].tolist()
    tokens = [flat[first:last] for first, last in pairwise([0, *ends])]
    bounds = group.offsets.tolist()
    return [tokens[first:last] for first, last in pairwise(bounds)]
