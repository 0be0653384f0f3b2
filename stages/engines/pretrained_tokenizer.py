"""`PretrainedTokenizer`: the tokenizer in a folder, as transformers saves it, between text and token ids.

Nothing is ever fetched: the folder is there, or it is an error. Knows no chat: a template is a part of the tokenizer's
identity, and applied by whoever makes prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.extras import extra

__all__ = ["PretrainedTokenizer"]


class PretrainedTokenizer:
    """A `Tokenizer` out of a folder with `tokenizer.json` and `tokenizer_config.json`.

    Pickled, it is the folder: a worker reads it anew. Blocks while it reads: make it before the run begins.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the folder.

        Raises:
            InvalidConfig: there is no tokenizer in it, or a broken one, or one that does not say which token ends a
                completion.
        """
        self.name_or_path: str = str(folder)
        """The folder."""
        path = Path(folder).absolute()
        self.revision: str | None = path.name if path.parent.name == "snapshots" else None
        """The commit, where the folder lies in the cache of Hugging Face's hub."""
        self._tokenizer = _loaded(path / "tokenizer.json")
        config = _config(path / "tokenizer_config.json")
        self.eos_id: int = self._end(config.get("eos_token"), path)
        """The token that ends a completion."""
        template = path / "chat_template.jinja"
        self.chat_template: Any = template.read_text() if template.is_file() else config.get("chat_template")
        """What makes a prompt of messages; None where there is nothing."""

    def __repr__(self) -> str:
        return f"PretrainedTokenizer({self.name_or_path!r})"

    def __reduce__(self) -> tuple[type[PretrainedTokenizer], tuple[str]]:
        return PretrainedTokenizer, (self.name_or_path,)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with no token added at either end."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def get_vocab(self) -> Mapping[str, int]:
        """Every token and its id."""
        vocabulary: Mapping[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def get_added_tokens_decoder(self) -> Mapping[int, Any]:
        """Tokens that were added to the vocabulary, by id."""
        added: Mapping[int, Any] = self._tokenizer.get_added_tokens_decoder()
        return added

    def _end(self, told: Any, path: Path) -> int:
        token = told.get("content") if isinstance(told, dict) else told
        index = None if token is None else self._tokenizer.token_to_id(token)
        if index is None:
            raise InvalidConfig(
                f"{path / 'tokenizer_config.json'}: expected an eos_token of the vocabulary, got {told!r}"
            )
        return int(index)


def _loaded(path: Path) -> Any:
    if not path.is_file():
        raise InvalidConfig(f"{path}: expected a tokenizer saved by `save_pretrained(folder)`, got no such file")
    with extra("tokenizers", "PretrainedTokenizer"):
        import tokenizers  # noqa: PLC0415 (a policy without text does not need it)
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise InvalidConfig(f"{path}: expected a tokenizer, got {error}: save it anew") from error
    loaded.no_padding()
    loaded.no_truncation()
    return loaded


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: expected a JSON object, got {error}: save it anew") from error
