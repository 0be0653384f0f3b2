"""The rows that an Atropos environment scored, each matched with the seat whose answers it holds.

Environments shuffle rows and leave some out, so a row is not matched by its position, but by its tokens,
by its messages, or by the text of its trained tokens. A row that matches no seat is dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from ..contract import BY_TOKEN, UNTRAINED
from .messages import Action, NotScored

__all__ = ["MessageSource", "reward_of", "sampled", "scored_by", "without_thoughts"]

OF_A_GROUP = frozenset({"generation_params", "group_overrides", "images", "env_id"})
"""Fields that have no entry for each sequence."""


class MessageSource(Protocol):
    """The known answers of a seat."""

    text: str | None
    """The last action; None before the first."""
    tokens: Sequence[int] | None
    """The whole sequence, if it is known."""


def scored_by(result: Any, sources: Sequence[MessageSource], tokenizer: Any) -> list[dict[str, Any] | None]:
    """Return the row of each source in the result of the environment; the last one of several.

    Raises:
        TypeError: the result is none that Atropos would accept.
    """
    matched: list[dict[str, Any] | None] = [None] * len(sources)
    for rows in _groups(result):
        left = list(range(len(sources)))
        for row in rows:
            found = _owner(row, [sources[index] for index in left], tokenizer, alone=len(rows) == len(sources) == 1)
            if found is not None:
                matched[left.pop(found)] = row
    return matched


def reward_of(row: Mapping[str, Any] | None) -> float:
    """Return the score of a row.

    Raises:
        NotScored: there is none, or it is no finite number.
    """
    if row is None:
        raise NotScored(
            "expected the environment to score this episode, got no score: it may drop groups whose scores are equal, "
            "where a group_size of more than 1 helps, or answers that are short"
        )
    score = float(row["scores"])
    if not math.isfinite(score):
        raise NotScored(f"expected a finite score, got {score}")
    return score


# -- sampled columns ---------------------------------------------------------------------------------------------------


def sampled(row: Mapping[str, Any], actions: Sequence[Action]) -> dict[str, Any]:
    """Return `row` without token ids and the fields by token, unless exactly those train that came with `actions`.

    Environments encode text to ids, and invent log-probabilities: neither was sampled.
    """
    given = [int(token) for action in actions for token in action.tokens or ()]
    logprobs: list[float | None] = []
    for action in actions:
        logprobs += action.logprobs or [None] * len(action.tokens or ())
    trained = [at for at, mask in enumerate(row.get("masks") or ()) if mask != UNTRAINED]
    start = _last(given, [int(row["tokens"][at]) for at in trained])
    invented: set[str] = set()
    if start is None:
        invented = {"tokens", *BY_TOKEN}
    elif not _equal(row.get("inference_logprobs"), dict(zip(trained, logprobs[start:], strict=False))):
        invented = {"inference_logprobs"}
    return {name: value for name, value in row.items() if name not in invented}


def _last(given: list[int], wanted: list[int]) -> int | None:
    """Return the start of the last occurrence of `wanted`; None if it does not occur, or is empty."""
    starts = range(len(given) - len(wanted), -1, -1) if wanted else ()
    return next((start for start in starts if given[start : start + len(wanted)] == wanted), None)


def _equal(row: Any, logprobs: Mapping[int, float | None]) -> bool:
    """Return whether `row` is None, or has these, to the precision of float32."""
    return row is None or all(
        logprob is not None and at < len(row) and _close(row[at], logprob) for at, logprob in logprobs.items()
    )


def _close(value: Any, logprob: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, logprob, rel_tol=1e-6, abs_tol=1e-6)


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


# -- matching ----------------------------------------------------------------------------------------------------


def _owner(row: Mapping[str, Any], sources: Sequence[MessageSource], tokenizer: Any, *, alone: bool) -> int | None:
    """Return the index of the source whose answers `row` holds; None if it matches none.

    Environments reformat answers, and templates strip thoughts, so the comparison ignores both.
    """
    if alone:
        return 0
    for index, source in enumerate(sources):
        if source.tokens is not None and list(source.tokens) == list(row.get("tokens") or ()):
            return index
    answer = _answer_text(row, tokenizer)
    for normalize in (squeezed, without_thoughts):
        texts = {index: normalize(source.text) for index, source in enumerate(sources) if source.text is not None}
        end = None if answer is None else normalize(answer)
        fits = [index for index, text in texts.items() if end is not None and (end.endswith(text) if text else not end)]
        if fits:
            return max(fits, key=lambda index: len(texts[index]))
    return None


def _answer_text(row: Mapping[str, Any], tokenizer: Any) -> str | None:
    """Return text that ends with the last answer of a row; None if the row holds none."""
    messages = row.get("messages")
    if messages:
        answers = [message for message in messages if message["role"] == "assistant"]
        return str(answers[-1]["content"]) if answers else None
    if tokenizer is None or not row.get("tokens"):
        return None
    trained = [token for token, mask in zip(row["tokens"], row["masks"], strict=True) if mask != UNTRAINED]
    end = getattr(tokenizer, "eos_token", None) or ""
    return str(tokenizer.decode(trained)).strip().removesuffix(end)


def squeezed(text: str) -> str:
    """Return `text` without white space."""
    return "".join(text.split())


def without_thoughts(text: str) -> str:
    """Return `text` without white space and without the text between <think> and </think>."""
    return squeezed(re.sub("<think>.*?</think>", "", text, flags=re.DOTALL))
