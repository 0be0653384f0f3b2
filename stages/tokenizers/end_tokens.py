"""The tokens that end a completion: those of the tokenizer, of the model's generation, and of the chat template.

A model that was tuned for chats ends its turns with another token than the tokenizer's `eos_token` at the end of a
text. All of them end a completion, as they do for transformers and vLLM, and none of them is text that a reward reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..._pipeline.errors import InvalidConfig, InvalidData
from ..contracts.policies import Tokenizer
from .chat_templates import rendered, template_of
from .json_object import json_object

CONFIG, GENERATION = "config.json", "generation_config.json"

TURN = "penstock turn"
"""Content of the turn before the searched end; no template changes it."""


@runtime_checkable
class HasEndTokens(Protocol):
    """A tokenizer, or a model, that knows every token that ends a completion."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Return the tokens that end a completion."""
        ...


def end_ids_of(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a completion: all that `tokenizer` knows, or its `eos_id`."""
    return tokenizer.end_ids if isinstance(tokenizer, HasEndTokens) else frozenset({tokenizer.eos_id})


def generation_ends(folder: Path) -> frozenset[int]:
    """Return the tokens that end transformers' `generate` with the model in `folder`. Blocks.

    Raises:
        InvalidConfig: the file has something else than ids.
    """
    path = next((path for name in (GENERATION, CONFIG) if (path := folder / name).is_file()), None)
    if path is None:
        return frozenset()
    config = json_object(path)
    found = config.get("eos_token_id")
    if found is None and path.name == CONFIG:  # as transformers reads a model of several parts
        parts = [config[name] for name in ("decoder", "generator", "text_config") if config.get(name)]
        found = parts[0].get("eos_token_id") if parts else None
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise InvalidConfig(f"{path}: eos_token_id: expected a token id, or a list of them, got {found!r}")
    return frozenset(ids)


def end_of_turn(tokenizer: Any) -> str:
    """Return the text after a turn of the assistant by the template of `tokenizer`; empty if unknown.

    If the template adds no text after the last turn, that is the text before the next message, such as `<|user|>`.
    """
    if template_of(tokenizer) is None:
        return ""
    return _after_turn(tokenizer, last=True) or _after_turn(tokenizer, last=False)


def template_ends(tokenizer: Any) -> frozenset[int]:
    """Return the token that the template of `tokenizer` writes after a turn, if it begins with an added token."""
    ids = list(tokenizer.encode(end_of_turn(tokenizer)))[:1]
    return frozenset(ids).intersection(tokenizer.get_added_tokens_decoder())


def check_end_of_turn(tokenizer: Tokenizer) -> None:
    """Check that a turn as the template of `tokenizer` writes it ends with a token that ends a completion.

    A template without text between a turn and the next message passes.

    Raises:
        InvalidConfig: it ends with a text of several tokens: no completion ends there.
    """
    end = end_of_turn(tokenizer)
    ids = list(tokenizer.encode(end))
    if not ids or ids[0] in end_ids_of(tokenizer) or not _after_turn(tokenizer, last=False).startswith(end):
        return
    raise InvalidConfig(
        f"{tokenizer!r}: expected a chat template that ends a turn of the assistant with a token that ends completions "
        f"({named(tokenizer)}), got {end!r}, which is {len(ids)} tokens of text: add it to the tokenizer as a special "
        f"token, or end turns with one of these in chat_template.jinja"
    )


def named(tokenizer: Tokenizer) -> str:
    """Return the tokens that end a completion as text, with their ids."""
    return ", ".join(f"{tokenizer.decode([each])!r} ({each})" for each in sorted(end_ids_of(tokenizer)))


def _after_turn(tokenizer: Any, *, last: bool) -> str:
    """Return the text after a turn, without the white space around it; empty if the template does not render it."""
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": TURN}]
    following = [] if last else [{"role": "user", "content": "another"}]
    try:
        text = rendered(tokenizer, [*messages, *following], generation_prompt=False)
    except InvalidData:  # `ChatFormat` says so where it is used
        return ""
    return text.partition(TURN)[2].strip()
