"""`PretrainedTokenizer`: the tokenizer in a folder, as transformers saves it, between text and token ids.

Nothing is ever fetched: the folder is there, or it is an error. Knows no chat: a template is a part of the tokenizer's
identity, and applied by whoever makes prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from ..pipeline.errors import InvalidConfig

__all__ = ["PretrainedTokenizer"]


@dataclass(frozen=True)
class PretrainedTokenizer:
    """A `Tokenizer` out of a folder with `tokenizer.json` and `tokenizer_config.json`; read when it is first used.

    Pickled, it is the folder: a worker reads it anew.
    """

    folder: str | Path

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with no token added at either end."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    @cached_property
    def eos_id(self) -> int:
        """The token that ends a completion.

        Raises:
            InvalidConfig: the folder does not say which it is.
        """
        told = self._config.get("eos_token")
        token = told.get("content") if isinstance(told, dict) else told
        index = None if token is None else self._tokenizer.token_to_id(token)
        if index is None:
            path = self._path("tokenizer_config.json")
            raise InvalidConfig(f"{path}: expected an eos_token of the vocabulary, got {told!r}")
        return int(index)

    @cached_property
    def chat_template(self) -> Any:
        """What makes a prompt of messages; None where there is nothing."""
        own = self._path("chat_template.jinja")
        return own.read_text() if own.exists() else self._config.get("chat_template")

    def get_vocab(self) -> Mapping[str, int]:
        """Every token and its id."""
        vocabulary: Mapping[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def get_added_tokens_decoder(self) -> Mapping[int, Any]:
        """Tokens that were added to the vocabulary, by id."""
        added: Mapping[int, Any] = self._tokenizer.get_added_tokens_decoder()
        return added

    @property
    def name_or_path(self) -> str:
        """The folder."""
        return str(self.folder)

    @property
    def revision(self) -> str | None:
        """The commit, where the folder lies in the cache of Hugging Face's hub."""
        path = Path(self.folder).absolute()
        return path.name if path.parent.name == "snapshots" else None

    @cached_property
    def _tokenizer(self) -> Any:
        path = self._path("tokenizer.json")
        if not path.is_file():
            raise InvalidConfig(f"{path}: expected a tokenizer saved by `save_pretrained(folder)`, got no such file")
        loaded = tokenizers.Tokenizer.from_file(str(path))
        loaded.no_padding()
        loaded.no_truncation()
        return loaded

    @cached_property
    def _config(self) -> dict[str, Any]:
        path = self._path("tokenizer_config.json")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}

    def _path(self, name: str) -> Path:
        return Path(self.folder) / name

    def __reduce__(self) -> tuple[type[PretrainedTokenizer], tuple[str | Path]]:
        return PretrainedTokenizer, (self.folder,)
