"""The rows that an Atropos environment scored, each matched with the seat whose answers it holds.

Environments shuffle rows and leave some out, so that a row is never matched by its place: it is matched by its tokens,
by its messages, or by the text of its trained tokens. A row that matches no seat is no seat's score.
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
    """What is known of a seat's answers."""

    text: str | None
    """The last action; None before there was one."""
    tokens: Sequence[int] | None
    """The whole sequence, where it is known."""


def scored_by(result: Any, sources: Sequence[MessageSource], tokenizer: Any) -> list[dict[str, Any] | None]:
    """Return the row of each source in what the environment collected; the last one of several.

    Raises:
        TypeError: it collected what Atropos would not take.
    """
    given: list[dict[str, Any] | None] = [None] * len(sources)
    for rows in _groups(result):
        left = list(range(len(sources)))
        for row in rows:
            found = _owner(row, [sources[index] for index in left], tokenizer, alone=len(rows) == len(sources) == 1)
            if found is not None:
                given[left.pop(found)] = row
    return given


def reward_of(row: Mapping[str, Any] | None) -> float:
    """Return the score of a row.

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
    """Return `row` without token ids, and what goes with them, unless just those train that came with `actions`.

    Environments encode text to ids, and make up log-probabilities: neither was sampled.
    """
    said = [int(token) for action in actions for token in action.tokens or ()]
    logprobs: list[float | None] = []
    for action in actions:
        logprobs += action.logprobs or [None] * len(action.tokens or ())
    trained = [at for at, mask in enumerate(row.get("masks") or ()) if mask != UNTRAINED]
    start = _last(said, [int(row["tokens"][at]) for at in trained])
    made_up: set[str] = set()
    if start is None:
        made_up = {"tokens", *BY_TOKEN}
    elif not _equal(row.get("inference_logprobs"), dict(zip(trained, logprobs[start:], strict=False))):
        made_up = {"inference_logprobs"}
    return {name: value for name, value in row.items() if name not in made_up}


def _last(said: list[int], wanted: list[int]) -> int | None:
    """Return where `wanted` begins for the last time; None where it does not, or is empty."""
    starts = range(len(said) - len(wanted), -1, -1) if wanted else ()
    return next((start for start in starts if said[start : start + len(wanted)] == wanted), None)


def _equal(told: Any, logprobs: Mapping[int, float | None]) -> bool:
    """Return whether the row has none, or these, to the precision of float32."""
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


# -- matching ----------------------------------------------------------------------------------------------------


def _owner(row: Mapping[str, Any], sources: Sequence[MessageSource], tokenizer: Any, *, alone: bool) -> int | None:
    """Return which of `sources` gave the answers of `row`; as far as they were kept.

    Environments reformat answers, and templates strip thoughts.
    """
    if alone:
        return 0
    for index, source in enumerate(sources):
        if source.tokens is not None and list(source.tokens) == list(row.get("tokens") or ()):
            return index
    said = _said(row, tokenizer)
    for words in (squeezed, without_thoughts):
        texts = {index: words(source.text) for index, source in enumerate(sources) if source.text is not None}
        told = None if said is None else words(said)
        fits = [
            index for index, text in texts.items() if told is not None and (told.endswith(text) if text else not told)
        ]
        if fits:
            return max(fits, key=lambda index: len(texts[index]))
    return None


def _said(row: Mapping[str, Any], tokenizer: Any) -> str | None:
    """Return the answers of a row as far as it tells; the last one stands at the end."""
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
    """Return `text` without white space and without what stands between <think> and </think>."""
    return squeezed(re.sub("<think>.*?</think>", "", text, flags=re.DOTALL))
