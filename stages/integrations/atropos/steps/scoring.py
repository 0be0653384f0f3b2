"""What an Atropos environment scored, told apart by who said it.

Environments shuffle what they score and leave rows out, so that a row is never known by its place: it is known by its
tokens, by its messages, or by what its trained tokens say. Where it is not known, nobody is given its score.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from .....pipeline.errors import PenstockError
from ..contract import BY_TOKEN, UNTRAINED
from .conversation import Action

__all__ = ["NotScored", "Speaker", "reward_of", "sampled", "scored_by"]

OF_A_GROUP = frozenset({"generation_params", "group_overrides", "images", "env_id"})
"""Fields that have no entry for each sequence."""


class NotScored(PenstockError):
    """The environment gave an episode no score: environments drop what they cannot learn from."""


class Speaker(Protocol):
    """What is known of who said something."""

    text: str | None
    """The last action; None before there was one."""
    tokens: Sequence[int] | None
    """The whole sequence, where it is known."""


def scored_by(result: Any, speakers: Sequence[Speaker], tokenizer: Any) -> list[dict[str, Any] | None]:
    """The row of each of `speakers` in what collect_trajectory or collect_trajectories returned; the last, of several.

    Raises:
        TypeError: the result is none that Atropos knows.
    """
    given: list[dict[str, Any] | None] = [None] * len(speakers)
    for rows in _groups(result):
        left = list(range(len(speakers)))
        for row in rows:
            found = _owner(row, [speakers[index] for index in left], tokenizer, alone=len(rows) == len(speakers) == 1)
            if found is not None:
                given[left.pop(found)] = row
    return given


def reward_of(row: Mapping[str, Any] | None) -> float:
    """The score of a row.

    Raises:
        NotScored: there is none, or it is no finite number.
    """
    if row is None:
        raise NotScored(
            "expected the environment to score this episode, got nothing: it may drop groups whose scores are equal, "
            "where a group_size of more than 1 helps, or answers that are short"
        )
    score = float(row["scores"])
    if not math.isfinite(score):
        raise NotScored(f"expected a finite score, got {score}")
    return score


# -- what was sampled --------------------------------------------------------------------------------------------------


def sampled(row: Mapping[str, Any], actions: Sequence[Action]) -> dict[str, Any]:
    """`row` without token ids, and what goes with them, unless just those train that came with `actions`.

    Environments make ids of words, and log-probabilities of nothing: a policy learns nothing from either.
    """
    made_up: set[str] = set()
    if (logprobs := _trained_logprobs(row, actions)) is None:
        made_up = {"tokens", *BY_TOKEN}
    elif not _equal(row.get("inference_logprobs"), logprobs):
        made_up = {"inference_logprobs"}
    return {name: value for name, value in row.items() if name not in made_up}


def _trained_logprobs(row: Mapping[str, Any], actions: Sequence[Action]) -> dict[int, float | None] | None:
    """Of tokens that train, by place, as far as they are known; None where others train than came with `actions`."""
    tokens, masks = (row.get(name) for name in ("tokens", "masks"))
    if tokens is None or masks is None:
        return None
    ids = [int(token) for token in tokens]
    said: dict[int, float | None] = {}
    end = len(ids)
    for action in reversed(actions):  # the same ids may stand in a prompt: what was said stands behind it
        if action.tokens is None or (start := _last(ids, [*map(int, action.tokens)], end)) is None:
            return None
        said |= enumerate(action.logprobs or [None] * len(action.tokens), start)
        end = start
    trained = [at for at, mask in enumerate(masks) if mask != UNTRAINED]
    return {at: said[at] for at in trained} if said.keys() >= set(trained) else None


def _last(ids: Sequence[int], wanted: Sequence[int], end: int) -> int | None:
    """Where `wanted` stands for the last time within the first `end` of `ids`."""
    starts = range(end - len(wanted), -1, -1)
    return next((start for start in starts if ids[start : start + len(wanted)] == wanted), None)


def _equal(told: Any, logprobs: Mapping[int, float | None]) -> bool:
    """Whether the row has none, or these, as far as float32 has them."""
    return told is None or all(
        logprob is not None and at < len(told) and _close(told[at], logprob) for at, logprob in logprobs.items()
    )


def _close(told: Any, logprob: float) -> bool:
    return isinstance(told, int | float) and math.isclose(told, logprob, rel_tol=1e-6, abs_tol=1e-6)


# -- rows --------------------------------------------------------------------------------------------------------------


def _groups(result: Any) -> Iterator[list[dict[str, Any]]]:
    scored = result[0] if isinstance(result, tuple) else result
    for group in scored if isinstance(scored, list) else [scored]:
        if group is None:
            continue
        if not isinstance(group, Mapping) or "scores" not in group:
            raise TypeError(f"expected scored data, a list of them or None, got {type(group).__name__}")
        yield _rows(group)


def _rows(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not hasattr(group["scores"], "__len__"):
        return [dict(group)]
    count = len(group["scores"])
    return [{name: _entry(name, value, index, count) for name, value in group.items()} for index in range(count)]


def _entry(name: str, value: Any, index: int, count: int) -> Any:
    by_sequence = name not in OF_A_GROUP and hasattr(value, "__len__") and len(value) == count
    return value[index] if by_sequence else value


# -- whose they are ----------------------------------------------------------------------------------------------------


def _owner(row: Mapping[str, Any], speakers: Sequence[Speaker], tokenizer: Any, *, alone: bool) -> int | None:
    """Which of `speakers` said it."""
    if alone:
        return 0
    for index, speaker in enumerate(speakers):
        if speaker.tokens is not None and list(speaker.tokens) == list(row.get("tokens") or ()):
            return index
    said = _said(row, tokenizer)
    texts = {index: speaker.text.strip() for index, speaker in enumerate(speakers) if speaker.text is not None}
    fits = [index for index, text in texts.items() if said is not None and (said.endswith(text) if text else not said)]
    return max(fits, key=lambda index: len(texts[index]), default=None)


def _said(row: Mapping[str, Any], tokenizer: Any) -> str | None:
    """What the policy said, as far as the row tells: at its end stands the last action."""
    messages = row.get("messages")
    if messages:
        answers = [message for message in messages if message["role"] == "assistant"]
        return str(answers[-1]["content"]).strip() if answers else None
    if tokenizer is None or not row.get("tokens"):
        return None
    trained = [token for token, mask in zip(row["tokens"], row["masks"], strict=True) if mask != UNTRAINED]
    end = getattr(tokenizer, "eos_token", None) or ""
    return str(tokenizer.decode(trained)).strip().removesuffix(end).strip()
