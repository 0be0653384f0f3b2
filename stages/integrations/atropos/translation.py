"""Translate an Atropos environment's scored data to a `TrajectoryGroup` and back, field by field.

`masks` hold the token at positions that train, and −100 elsewhere. `inference_logprobs` are 1.0 elsewhere, never a
log-probability; a column of a group is 0 there. `scores` are rewards. A teacher's candidates describe the token at
their own position, as in penstock, some for each token; columns are as wide as the token with the most, and −1 where a
token has fewer. Every field that is no column goes unchanged into `meta`, under its name in `META`.

The contract has no field for stop reasons. An override of a sequence may give one, under OpenAI's names.

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

from ...._schemas import Array, InvalidRecord, StopReason, TrajectoryGroup
from ...._schemas.columns import freeze
from ...contracts.candidates import ROUNDING, TeacherCandidates
from ...contracts.sampling_params import TEMPERATURES
from ...http.completion_stream import STOP_REASONS
from ..flow_thread.sampling import check_unbranched
from .contract import BY_TOKEN, NO_LOGPROB, UNTRAINED, ScoredData, Untrainable

META = ("env_id", "messages", "overrides", "group_overrides", "generation_params", "images")
"""Fields of the contract that are kept in `meta`. Lists over sequences are indexed by repetition id."""

FINISH_REASON = "finish_reason"
"""The key of a stop reason in the override of a sequence."""

FINISH_REASONS = {reason: name for name, reason in reversed(STOP_REASONS.items())}

MSGPACK_FLOAT = np.dtype([("tag", "u1"), ("value", ">f8")])
"""A float in msgpack."""

MSGPACK_FLOAT_TAG = 0xCB


def to_group(
    scored: ScoredData, *, env: str, instance_id: str, policy_version: int, candidates: int | None = None
) -> TrajectoryGroup:
    """Return `scored` as a group.

    >>> scored = ScoredData(tokens=[[5, 6]], masks=[[-100, 6]], scores=[1.0], inference_logprobs=[[1.0, -0.5]])
    >>> to_group(scored, env="math", instance_id="0", policy_version=3).behavior_logprobs.tolist()
    [0.0, -0.5]

    Args:
        scored: the group as it was sent.
        env: name of the environment.
        instance_id: name of the prompt; not part of Atropos.
        policy_version: of all its tokens; Atropos does not send it.
        candidates: width of the teacher's columns, for groups of one width fit into one batch; the token itself and
            the likeliest of more are kept. None for as many as there are.

    Raises:
        Untrainable: naming the field, the expected type and the value.
    """
    try:
        _check_lengths(scored)
        columns, count = _columns(scored, candidates), len(scored.tokens)
        columns["policy_versions"] = np.full(count, policy_version, np.int64)
        columns["stop_reasons"] = _stop_reasons(scored, count)
        columns["rollout_ids"] = np.arange(count)
        group = TrajectoryGroup(env=env, instance_id=instance_id, meta=_meta(scored), **columns)
        group.validate()
    except Untrainable:
        raise
    except InvalidRecord as error:
        raise Untrainable("record", f"{error} (in {env}/{instance_id})") from None
    freeze(columns.values())
    return group


def as_if_sent(
    group: TrajectoryGroup, *, env: str, policy_version: int, candidates: int | None = None
) -> TrajectoryGroup:
    """Return a copy of `group` in private memory, as `to_group` would have made it; for groups that arrive decoded.

    `policy_version` is the current one; later ones in the group become this one. The other arguments and the error are
    those of `to_group`.
    """
    columns = {name: column.copy() for name, column in group.columns().items()}
    columns["policy_versions"] = np.minimum(group.policy_versions, policy_version)
    ids, logprobs = group.teacher_ids, group.teacher_logprobs
    if candidates is not None and ids is not None and logprobs is not None and ids.shape[1] != candidates:
        given = ids >= 0
        columns |= _teacher(TeacherCandidates(given.sum(axis=1), ids[given], logprobs[given]), group.tokens, candidates)
    freeze(columns.values())
    return msgspec.structs.replace(TrajectoryGroup.assemble(group.header(), columns), env=env)


def _check_lengths(scored: ScoredData) -> None:
    try:
        lengths = [*map(len, scored.tokens)]
        if not lengths:
            raise Untrainable("sequences", "tokens: expected at least one sequence, got none")
        for name in ("scores", "overrides"):
            if ((found := getattr(scored, name)) or name == "scores") and len(found) != len(lengths):
                raise Untrainable(
                    "lengths", f"{name}: expected one for each of {len(lengths)} sequences, got {len(found)}"
                )
        for name in BY_TOKEN:
            if ((rows := getattr(scored, name)) or name == "masks") and (found := [*map(len, rows)]) != lengths:
                raise Untrainable("lengths", f"{name}: expected lists of {lengths} entries, as in tokens, got {found}")
    except TypeError as error:
        raise Untrainable("lengths", f"expected lists, with one list for each sequence, got others ({error})") from None
    if bool(scored.distill_token_ids) != bool(scored.distill_logprobs):
        raise Untrainable("teacher", "distill_token_ids, distill_logprobs: expected both or neither, got one")


def _meta(scored: ScoredData) -> dict[str, Any]:
    meta = {name: value for name in META if (value := getattr(scored, name)) not in (None, [], {})}
    if temperatures := _temperatures(scored):
        meta[TEMPERATURES] = temperatures
    return meta


def _stop_reasons(scored: ScoredData, count: int) -> NDArray[np.uint8]:
    """Return [S] those of the overrides, `STOP` if absent or unknown."""
    found = [STOP_REASONS.get(str(own.get(FINISH_REASON)), StopReason.STOP) for own in scored.overrides or [{}] * count]
    return np.array(found, np.uint8)


def _temperatures(scored: ScoredData) -> list[float]:
    """Return one for each sequence, or [] if none is given. A sequence's own has priority over the generation's."""
    shared = {**(scored.group_overrides or {}), **(scored.generation_params or {})}.get("temperature")
    found = [own.get("temperature", shared) for own in scored.overrides or [{}] * len(scored.tokens)]
    for sequence, temperature in enumerate(found):
        if temperature is not None and not (isinstance(temperature, int | float) and temperature >= 0):
            message = f"temperature of sequence {sequence}: expected a number of 0 or more, got {temperature!r}"
            raise Untrainable("temperature", message)
    return [float(one or 1.0) for one in found] if {*found} != {None} else []  # 0 is greedy: the model's own logprobs


# -- lists to columns --------------------------------------------------------------------------------------------------


def _columns(scored: ScoredData, candidates: int | None) -> dict[str, Any]:
    offsets = np.cumsum([0, *map(len, scored.tokens)])
    tokens = _ints("tokens", scored.tokens)
    mask = _loss_mask(tokens, _ints("masks", scored.masks), offsets)
    columns: dict[str, Any] = {"tokens": tokens, "offsets": offsets, "loss_mask": mask}
    columns["rewards"] = _floats("scores", [scored.scores])
    if rows := scored.inference_logprobs:
        columns["behavior_logprobs"] = _logprobs(_floats("inference_logprobs", rows), mask, offsets)
    for name in ("advantages", "ref_logprobs"):
        if rows := getattr(scored, name):
            columns[name] = _floats(name, rows)
    if scored.distill_token_ids and scored.distill_logprobs:
        columns |= _teacher(_candidates(scored.distill_token_ids, scored.distill_logprobs), tokens, candidates)
    return columns


def _loss_mask(tokens: NDArray[np.int32], masks: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return [N] true on tokens that train; a sequence's first does not, for no token predicts it."""
    mask: NDArray[np.bool_] = masks != UNTRAINED
    wrong = mask & (masks != tokens)
    if wrong.any():
        at = int(wrong.argmax())
        raise Untrainable(
            "masks",
            f"masks{_place(at, offsets)}: expected {UNTRAINED}, or {tokens[at]}, its token, got {masks[at]}",
        )
    mask[offsets[:-1][np.diff(offsets) > 0]] = False
    return mask


def _logprobs(sent: NDArray[np.float32], mask: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return [N] the log-probabilities of tokens that train, 0 elsewhere."""
    logprobs = np.where(mask, sent, np.float32(0))
    if len(logprobs) and logprobs.max() > ROUNDING:
        at = int(logprobs.argmax())
        raise Untrainable(
            "logprobs",
            f"inference_logprobs{_place(at, offsets)}: expected 0 or less where a token trains, got {logprobs[at]:g}: "
            f"{NO_LOGPROB:g} marks positions that do not, so masks and log-probabilities are not aligned",
        )
    return logprobs


def _place(at: int, offsets: NDArray[np.int64]) -> str:
    sequence = int(np.searchsorted(offsets, at, side="right")) - 1
    return f"[{sequence}][{at - int(offsets[sequence])}]"


def _candidates(
    ids: Sequence[Sequence[Sequence[int]]], logprobs: Sequence[Sequence[Sequence[float]]]
) -> TeacherCandidates:
    """Return the candidates of all sequences, in the order of the tokens."""
    try:
        counts, others = (np.fromiter(map(len, chain.from_iterable(rows)), np.int64) for rows in (ids, logprobs))
    except TypeError as error:
        raise Untrainable("teacher", f"distill_token_ids, distill_logprobs: expected lists ({error})") from None
    if not np.array_equal(counts, others):
        at = int((counts != others).argmax())
        raise Untrainable(
            "teacher",
            f"distill_logprobs: expected {counts[at]} at token {at} of the group, as in distill_token_ids, "
            f"got {others[at]}",
        )
    flat_ids = _ints("distill_token_ids", [[*chain.from_iterable(chain.from_iterable(ids))]])
    return TeacherCandidates(
        counts, flat_ids, _floats("distill_logprobs", [[*chain.from_iterable(chain.from_iterable(logprobs))]])
    )


def _teacher(candidates: TeacherCandidates, tokens: NDArray[np.int32], width: int | None) -> dict[str, Array]:
    """Return `teacher_ids` and `teacher_logprobs`, [N, K]."""
    try:
        ids, logprobs = candidates.columns(tokens, int(candidates.counts.max(initial=0)) if width is None else width)
    except InvalidRecord as error:
        raise Untrainable("teacher", f"distill_token_ids, distill_logprobs: {error}") from None
    return {"teacher_ids": ids, "teacher_logprobs": logprobs}


def _ints(name: str, rows: Iterable[Sequence[int]]) -> NDArray[np.int32]:
    return np.frombuffer(_packed(name, rows, "i", "whole numbers of 32 bits"), np.int32)


def _floats(name: str, rows: Iterable[Sequence[float]]) -> NDArray[np.float32]:
    numbers = _encoded_floats(rows)
    if numbers is None:
        numbers = np.frombuffer(_packed(name, rows, "f", "numbers that float32 can hold"), np.float32)
    if not np.isfinite(numbers).all():
        got = numbers[~np.isfinite(numbers)][0]
        raise Untrainable("numbers", f"{name}: expected finite numbers that float32 can hold, got {got:g}")
    return numbers


def _encoded_floats(rows: Iterable[Sequence[float]]) -> NDArray[np.float32] | None:
    """Return `rows`, concatenated, if all are lists of floats; faster than `_packed`, by way of their msgpack."""
    if not all(type(row) is list for row in rows):
        return None
    try:
        encoded = b"".join([msgspec.msgpack.encode(row)[-MSGPACK_FLOAT.itemsize * len(row) :] for row in rows if row])
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    if len(encoded) != MSGPACK_FLOAT.itemsize * sum(map(len, rows)):
        return None
    floats = np.frombuffer(encoded, MSGPACK_FLOAT)
    with np.errstate(over="ignore"):  # a number that is too large becomes infinite
        return None if (floats["tag"] != MSGPACK_FLOAT_TAG).any() else floats["value"].astype(np.float32)


def _packed(name: str, rows: Iterable[Sequence[Any]], code: str, expected: str) -> bytes:
    """Return `rows`, concatenated, as C numbers; faster than `np.array`, and stricter."""
    try:
        return b"".join([struct.pack(f"{len(row)}{code}", *row) for row in rows])
    except (struct.error, OverflowError, TypeError) as error:
        raise Untrainable("numbers", f"{name}: expected {expected}, got others: {error}") from None


# -- and back ----------------------------------------------------------------------------------------------------------


def from_group(group: TrajectoryGroup) -> bytes:
    """Return `group` as JSON of the contract, with every field; absent ones are null."""
    return scored_of(group).json()


def scored_of(group: TrajectoryGroup) -> ScoredData:
    """Return `group` as an environment holds it before it is sent.

    The temperature that a SourceEnv records in `meta` becomes a generation parameter.

    Raises:
        InvalidRecord: a rollout has several sequences.
    """
    check_unbranched(group, "an Atropos trainer")
    mask = group.loss_mask
    kept = _kept(group.meta, group.rollout_ids.tolist())
    if (overrides := _overrides(kept.get("overrides"), group)) is not None:
        kept["overrides"] = overrides
    if group.behavior_logprobs is not None:
        kept["inference_logprobs"] = _rows(np.where(mask, group.behavior_logprobs, np.float32(NO_LOGPROB)), group)
    for name in ("advantages", "ref_logprobs"):
        if (column := getattr(group, name)) is not None:
            kept[name] = _rows(column, group)
    if group.teacher_ids is not None and group.teacher_logprobs is not None:
        given = (group.teacher_ids >= 0) & np.isfinite(group.teacher_logprobs)
        kept["distill_token_ids"] = _ragged(group.teacher_ids, given, group)
        kept["distill_logprobs"] = _ragged(group.teacher_logprobs, given, group)
    return ScoredData(
        tokens=_rows(group.tokens, group),
        masks=_rows(np.where(mask, group.tokens, np.int32(UNTRAINED)), group),
        scores=group.rewards.tolist(),
        **kept,
    )


def _kept(meta: Mapping[str, Any], repetitions: Sequence[int]) -> dict[str, Any]:
    """Return the fields in `META`; of those with an entry for each sequence, the entries of `repetitions`."""
    kept: dict[str, Any] = {name: meta[name] for name in META if name in meta}
    for name, kind in (("messages", list), ("overrides", dict)):
        rows = kept.get(name)
        if not (isinstance(rows, list) and all(isinstance(row, kind) for row in rows)):
            kept.pop(name, None)  # another source's `meta`, with another meaning
        elif len(rows) > max(repetitions, default=0):
            kept[name] = [rows[repetition] for repetition in repetitions]
    if "temperature" in meta:
        kept.setdefault("generation_params", {"temperature": meta["temperature"]})
    return kept


def _overrides(kept: Sequence[Mapping[str, Any]] | None, group: TrajectoryGroup) -> list[dict[str, Any]] | None:
    """Return the overrides with the stop reasons of the group; None if both are empty."""
    reasons = [StopReason(value) for value in group.stop_reasons.tolist()]
    if not kept and set(reasons) <= {StopReason.STOP}:
        return None
    rows = [dict(own) for own in kept or [{}] * len(reasons)]
    for own, reason in zip(rows, reasons, strict=True):
        if reason != StopReason.STOP:
            own.setdefault(FINISH_REASON, FINISH_REASONS[reason])
    return rows


def _rows(column: Array, group: TrajectoryGroup) -> list[list[Any]]:
    """Return a column over tokens as one list a sequence."""
    return _split(column.tolist(), group.offsets.tolist())


def _ragged(column: Array, given: NDArray[np.bool_], group: TrajectoryGroup) -> list[list[list[Any]]]:
    """Return the entries of a column that are `given` [N, K], as lists of each token's own length."""
    ends = given.sum(axis=1).cumsum().tolist()
    return _split(_split(column[given].tolist(), [0, *ends]), group.offsets.tolist())


def _split(flat: list[Any], bounds: list[int]) -> list[list[Any]]:
    return [flat[first:last] for first, last in pairwise(bounds)]
