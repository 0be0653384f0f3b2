"""`trained_turns`: a whole conversation to tokens, with a mask of those that the assistant says.

The tokens before a turn are those of the prompt that a sampler would get there. So the template renders the
conversation up to each turn, and each text must begin with the one before it. Knows no data set and no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import InvalidData, UnstableTemplate
from ..contracts.policies import Tokenizer
from .chat_format import ADVICE, ChatFormat
from .chat_templates import rendered
from .end_tokens import end_ids_of, named
from .messages import Message, with_names

WEIGHT = "weight"
"""Key of a turn of the assistant that says whether it trains, 1 or 0, as in OpenAI's format of fine-tuning."""

LAST_ALONE = f'train its last turn only: give the earlier turns of the assistant "{WEIGHT}": 0'


class TooLong(InvalidData):
    """A conversation with more tokens than the bound."""


def trained_turns(
    chat: ChatFormat, messages: Sequence[Message], max_length: int | None = None
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return [T] the tokens of a conversation up to its last turn that trains, and [T] true on those that train.

    A turn of the assistant trains unless its `weight` is 0: its content, and the token that ends it. If the template
    writes no such token after the last turn, the end of a text is added.

    Args:
        chat: the template, with its arguments and tools.
        messages: see `normalized`.
        max_length: the most tokens; turns after them are not rendered, for each costs as much as all before it.

    Raises:
        TooLong: there are more tokens.
        InvalidData: no turn trains, a weight is neither 0 nor 1, or the template refuses the messages.
        UnstableTemplate: it writes a turn in another way once another message follows, or ends none.
    """
    numbers = [number for number, message in enumerate(messages) if _trains(number, message)]
    if not numbers:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise InvalidData(f"messages: expected a turn of the assistant that trains, got the roles {roles}")
    said = with_names([{key: each for key, each in message.items() if key != WEIGHT} for message in messages])
    text, ids, spans = "", list[int](), list[tuple[int, int]]()
    for number in numbers:
        prompt, turn = _rendered(chat, said[:number], prompt=True), _rendered(chat, said[: number + 1], prompt=False)
        if not turn.startswith(prompt):
            raise UnstableTemplate(
                f"{chat.tokenizer!r}: expected a chat template that writes messages[{number}] after the beginning of "
                f"a turn, {prompt[-40:]!r}, got {turn[-80:]!r}: begin the content with what is missing; or {ADVICE}"
            )
        if not prompt.startswith(text):
            raise UnstableTemplate(
                f"{chat.tokenizer!r}: expected a chat template that leaves earlier turns of the assistant as they are, "
                f"got other text for those before messages[{number}], for example without their thoughts: {LAST_ALONE}"
            )
        before = _continued(chat.tokenizer, ids, text, prompt)
        text, ids = _ended(chat.tokenizer, turn, _continued(chat.tokenizer, before, prompt, turn), len(before))
        spans.append((len(before), len(ids)))
        _check_length(len(ids), max_length)
    tokens, mask = _masked(chat.tokenizer, ids, spans)
    _check_length(len(tokens), max_length)
    return tokens, mask


def _check_length(length: int, max_length: int | None) -> None:
    if max_length is not None and length > max_length:
        raise TooLong(f"conversation longer than {max_length} tokens")


def _trains(number: int, message: Message) -> bool:
    weight = message.get(WEIGHT, 1)
    if not isinstance(weight, int | float) or weight not in {0, 1}:
        raise InvalidData(f"messages[{number}].{WEIGHT}: expected 0 or 1, got {weight!r}")
    return message["role"] == "assistant" and bool(weight)


def _rendered(chat: ChatFormat, messages: Sequence[Message], *, prompt: bool) -> str:
    return rendered(chat.tokenizer, messages, chat.tools, arguments=chat.arguments, generation_prompt=prompt)


def _continued(tokenizer: Tokenizer, ids: list[int], text: str, longer: str) -> list[int]:
    """Return the tokens of `longer`, which begins with `text`; they begin with `ids`, those of `text`."""
    whole = list(tokenizer.encode(longer))
    if whole[: len(ids)] == ids:
        return whole
    return [*ids, *tokenizer.encode(longer[len(text) :])]  # a token would lie across the border


def _ended(tokenizer: Tokenizer, text: str, ids: list[int], begin: int) -> tuple[str, list[int]]:
    """Return text and tokens up to the first token from `begin` on that ends a completion; all if there is none.

    Some templates write more at the end of a conversation, and not where another message follows.
    """
    ends = end_ids_of(tokenizer)
    stop = next((place + 1 for place in range(begin, len(ids)) if ids[place] in ends), len(ids))
    rest = tokenizer.decode(ids[stop:])
    return (text.removesuffix(rest), ids[:stop]) if text.endswith(rest) else (text, ids)


def _masked(
    tokenizer: Tokenizer, ids: list[int], spans: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return tokens and mask; each span trains up to its first token that ends a completion.

    1. The template writes that token after the content.
    2. It is the first one of the next message.
    3. The last turn has none: the end of a text is added.
    """
    ends = end_ids_of(tokenizer)
    mask = np.zeros(len(ids) + 1, np.bool_)
    stop = len(ids)
    for begin, end in spans:
        stop = next((place for place in range(begin, min(end + 1, len(ids))) if ids[place] in ends), end)
        if stop == end < len(ids) and ids[end] not in ends:
            raise UnstableTemplate(
                f"{tokenizer!r}: expected a chat template that ends each turn of the assistant with one of "
                f"{named(tokenizer)}, got {tokenizer.decode(ids[end : end + 8])!r}; {ADVICE}"
            )
        mask[begin : stop + 1] = True
    tokens = np.array([*ids, tokenizer.eos_id], np.int32)
    return tokens[: stop + 1], mask[: stop + 1]
