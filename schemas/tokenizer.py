"""The identity of a tokenizer, comparable without the tokenizer itself.

Ids are defined by the tokenizer that made them: a run of two parts with different ones trains on noise without ever
failing. So the decisive parts are compared: the vocabulary, the special tokens, the end token, the chat template, and
the ids of a text, because two tokenizers of one vocabulary may split text in different ways. Names and revisions are
reported and not compared: one tokenizer may lie in two folders, and two of one name may differ. Knows the methods that
transformers and tokenizers give theirs, and imports neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, cycle
from typing import Annotated, Any

import msgspec

from .bounds import MOST_NAMES, Count, Line, Name, Signed
from .errors import InvalidConfig, TokenizersDiffer


class TokenizerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that distinguish one tokenizer from another. `None` is unknown, and not compared."""

    name: Line
    """The folder or name that it was loaded from; else its class. Not compared."""
    revision: Line | None = None
    """The revision of its source. Not compared."""
    vocabulary: Count
    """The number of tokens, added ones included."""
    vocabulary_hash: Name
    """SHA-256 of all tokens and their ids."""
    special_tokens: Annotated[tuple[tuple[Line, Signed], ...], msgspec.Meta(max_length=MOST_NAMES)] | None = None
    """Tokens that stand for no text, with their ids, by id."""
    eos_id: Signed | None = None
    """The token that ends a completion."""
    chat_template_hash: Name | None = None
    """SHA-256 of the template that makes a prompt of messages."""
    text_hash: Name | None = None
    """SHA-256 of the ids of the texts in `PROBES`, and of a text of words of the vocabulary."""

    def __str__(self) -> str:
        """Return the identity as text, with shortened hashes."""
        special = (
            "?" if self.special_tokens is None else f"{len(self.special_tokens)} #{_hash(self.special_tokens)[:8]}"
        )
        return (
            f"{self.name}{f' at {self.revision}' if self.revision else ''}: "
            f"{self.vocabulary} tokens #{self.vocabulary_hash[:8]}, special tokens {special}, "
            f"end token {'?' if self.eos_id is None else self.eos_id}, "
            f"chat template {f'#{self.chat_template_hash[:8]}' if self.chat_template_hash else '?'}, "
            f"ids of a text {f'#{self.text_hash[:8]}' if self.text_hash else '?'}"
        )


def tokenizer_identity(tokenizer: Any) -> TokenizerIdentity:
    """Return the identity of a tokenizer: transformers', tokenizers', or one with a `get_vocab() -> {token: id}`.

    >>> class Bits:
    ...     eos_id = 2
    ...
    ...     def get_vocab(self):
    ...         return {"0": 0, "1": 1, ".": 2}
    >>> str(tokenizer_identity(Bits()))
    'Bits: 3 tokens #12dec7e0, special tokens ?, end token 2, chat template ?, ids of a text ?'

    The identity of an identity is itself.

    Raises:
        InvalidConfig: it has no vocabulary.
    """
    if isinstance(tokenizer, TokenizerIdentity):
        return tokenizer
    if not hasattr(tokenizer, "get_vocab"):
        raise InvalidConfig(
            f"tokenizer: expected one with get_vocab() -> {{token: id}}, got {type(tokenizer).__name__}"
        )
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    template = getattr(tokenizer, "chat_template", None)
    return TokenizerIdentity(
        name=str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__),
        revision=getattr(tokenizer, "revision", None) or getattr(tokenizer, "init_kwargs", {}).get("_commit_hash"),
        vocabulary=len(vocabulary),
        vocabulary_hash=_hash(sorted((index, token) for token, index in vocabulary.items())),
        special_tokens=_special_tokens(tokenizer),
        eos_id=getattr(tokenizer, "eos_id", getattr(tokenizer, "eos_token_id", None)),
        chat_template_hash=_hash(template) if template else None,
        text_hash=_text_hash(tokenizer, vocabulary),
    )


PROBES = (
    "They'll say it's 1,234,567.89 or 20261123;  isn't IT'S?\n\n",
    "def f(x):\n\treturn x**2 + 3.0e-4  # ok\r\n\n   \n",
    "   leading,  trailing   ",
    "Größe naïve Ελληνικά Русский עברית العربية हिन्दी ไทย 中文，日本語。한국어 1２٣",
    "HTTPServer2x CamelCase snake_case 'quoted' http://a.b/c?d=1&e=%20 #### 12",
)
"""Texts at which tokenizers differ: contractions, numbers, spaces, code, scripts."""

WORDS = 256
"""Number of words of the vocabulary in a text: the merges of a tokenizer that was trained on few words."""

SPACES = {"Ġ": " ", "▁": " ", "Ċ": "\n"}
"""Spaces and line breaks as they are written in vocabularies."""


def _text_hash(tokenizer: Any, vocabulary: Mapping[str, int]) -> str | None:
    """Return SHA-256 of the ids of probes; None if the tokenizer cannot encode any."""
    words = sorted(vocabulary)[:: max(1, len(vocabulary) // WORDS)]
    joined = "".join(word + separator for word, separator in zip(words, cycle(("", " ", "\n", "1", "'", "."))))
    text = "".join(SPACES.get(letter, letter) for letter in joined)
    found = [_ids(tokenizer, probe) for probe in (*PROBES, text)]
    return None if all(ids is None for ids in found) else _hash(found)


def _ids(tokenizer: Any, text: str) -> list[int] | None:
    """Return the ids of `text` without tokens at either end; None if the tokenizer cannot encode it, or cuts it."""
    if (
        not hasattr(tokenizer, "encode")
        or getattr(tokenizer, "truncation", None)
        or getattr(tokenizer, "padding", None)
    ):
        return None
    try:
        try:
            encoded = tokenizer.encode(text, add_special_tokens=False)
        except TypeError:  # no such option: nothing is added
            encoded = tokenizer.encode(text)
        return [int(index) for index in getattr(encoded, "ids", encoded)]
    except Exception:  # noqa: BLE001 (a tokenizer of few letters raises any error for the others)
        return None


def _special_tokens(tokenizer: Any) -> tuple[tuple[str, int], ...] | None:
    """Return those of transformers' `added_tokens_decoder` or tokenizers' `get_added_tokens_decoder()`."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if added is None and hasattr(tokenizer, "get_added_tokens_decoder"):
        added = tokenizer.get_added_tokens_decoder()
    if added is None:
        return None
    return tuple((token.content, index) for index, token in sorted(added.items()) if token.special)


def _hash(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()


def disagreements(identities: Iterable[tuple[str, TokenizerIdentity]]) -> Iterator[str]:
    """Yield, for each two parts of a run with different tokenizers, the differences and both identities."""
    for (one, first), (other, second) in combinations(identities, 2):
        differing = [
            label for field, label in COMPARED.items() if _differ(getattr(first, field), getattr(second, field))
        ]
        if differing:
            yield f"{one} and {other} have tokenizers of different {', '.join(differing)}\n  {first}\n  {second}"


COMPARED = {
    "vocabulary_hash": "vocabulary",
    "special_tokens": "special tokens",
    "eos_id": "end token",
    "chat_template_hash": "chat template",
    "text_hash": "splitting of text",
}


def _differ(one: object, other: object) -> bool:
    return one is not None and other is not None and one != other


def check_tokenizers(parts: Mapping[str, Any]) -> None:
    """Compare the tokenizers of all parts of a run; `parts` are tokenizers or identities, by name.

    Raises:
        TokenizersDiffer: listing the differences, with both identities.
    """
    if found := list(disagreements((part, tokenizer_identity(tokenizer)) for part, tokenizer in parts.items())):
        raise TokenizersDiffer("\n".join(found))
