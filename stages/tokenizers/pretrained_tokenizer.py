"""`PretrainedTokenizer`: the tokenizer in a folder, as transformers saves it, between text and token ids.

No file is downloaded: a missing folder is an error. Applies no chat template: a template is part of the tokenizer's
identity, and `ChatFormat` applies it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.util.checkpoint import verify_if_listed
from ..._pipeline.util.extras import extra
from ..._pipeline.util.hub import absent
from .end_tokens import GENERATION, generation_ends, template_ends
from .json_object import json_object

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", GENERATION),
)
"""The files of a tokenizer, as transformers names them, and the one with the tokens that end a completion; most folders
have some of them."""


TEMPLATES = "additional_chat_templates"
"""The folder with templates by name, such as `tool_use`, beside `chat_template.jinja`."""

LONG_TEXT = 2**16
"""Characters."""

SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Names that transformers gives to special tokens."""


class PretrainedTokenizer:
    """A `Tokenizer` from a folder with `tokenizer.json` and `tokenizer_config.json`.

    It is pickled as its path, and read again in a worker. Reading blocks: make it before the run begins.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the folder.

        Raises:
            CheckpointDamaged: a file of a checkpoint or of an exported model is not as it was written.
            InvalidConfig: it contains no tokenizer, or a broken one, or one without the token that ends a completion.
        """
        self._read(folder)
        self.end_ids: frozenset[int] = generation_ends(Path(folder)) | template_ends(self) | {self.eos_id}
        """The tokens that end a completion: of this tokenizer, of the model's generation, and of the template: that is
        rendered for it if transformers is installed."""

    def _read(self, folder: str | Path) -> None:
        self.name_or_path: str = str(folder)
        """The folder."""
        path = Path(folder).absolute()
        if not path.is_dir():
            raise InvalidConfig(f"expected the folder of a model at {folder}, got {absent(Path(folder))}")
        self.revision: str | None = path.name if path.parent.name == "snapshots" else None
        """The commit, if the folder is in the cache of Hugging Face's hub."""
        verify_if_listed(path, lambda name: name in FILES or name.startswith(TEMPLATES))
        self._tokenizer = _loaded(path / "tokenizer.json")
        config, legacy = _config(path / "tokenizer_config.json"), _config(path / "special_tokens_map.json")
        config = _merged(config, legacy)
        self.eos_id: int = self._end(config.get("eos_token", legacy.get("eos_token")), path)
        """The token that ends a text, `eos_token`; `end_ids` has all that end a completion."""
        self.start_ids: tuple[int, ...] = _start_ids(self._tokenizer)
        """The tokens that begin a text, such as `<bos>`; none with many tokenizers."""
        _check_added(path, {**legacy, **config}, self._tokenizer.token_to_id)
        self.chat_template: Any = _template(path, config)
        """The template that makes a prompt of messages, or several by name; None if there is none."""
        self.special_tokens_map: Mapping[str, str] = _special_tokens(config)
        """The text of special tokens by the names that templates use: `bos_token`, `eos_token`, …"""

    def __repr__(self) -> str:
        return f"PretrainedTokenizer({self.name_or_path!r})"

    def __reduce__(self) -> tuple[Callable[..., PretrainedTokenizer], tuple[str, frozenset[int]]]:
        return _read_again, (self.name_or_path, self.end_ids)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with no token added at either end."""
        if len(text) <= LONG_TEXT:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        else:  # lets other threads run meanwhile
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def get_vocab(self) -> Mapping[str, int]:
        """Return every token with its id."""
        vocabulary: Mapping[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def get_added_tokens_decoder(self) -> Mapping[int, Any]:
        """Return the tokens that were added to the vocabulary, by id."""
        added: Mapping[int, Any] = self._tokenizer.get_added_tokens_decoder()
        return added

    def _end(self, eos_token: Any, path: Path) -> int:
        token = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
        index = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if index is None:
            raise InvalidConfig(
                f"{path / 'tokenizer_config.json'}: expected an eos_token of the vocabulary, here or in "
                f"special_tokens_map.json, got {eos_token!r}: save the tokenizer again with one"
            )
        return int(index)


def _read_again(folder: str, end_ids: frozenset[int]) -> PretrainedTokenizer:
    """Return the tokenizer in `folder`; another process has rendered its template to find `end_ids`."""
    tokenizer = PretrainedTokenizer.__new__(PretrainedTokenizer)
    tokenizer._read(folder)  # noqa: SLF001 (its own class)
    tokenizer.end_ids = end_ids
    return tokenizer


def _start_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that `tokenizer` adds before a text, as transformers does when it is called with one."""
    encoded = tokenizer.encode("a")
    before = takewhile(lambda pair: pair[1], zip(encoded.ids, encoded.special_tokens_mask, strict=True))
    return tuple(index for index, _ in before)


def copy_tokenizer(source: Path, into: Path) -> None:
    """Copy the files of the tokenizer in `source`, its template included, to the folder `into`."""
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, into / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, into / TEMPLATES, dirs_exist_ok=True)


def end_texts_of(tokenizer: Any) -> tuple[str, ...]:
    """Return the text of the tokens that end a completion, of a tokenizer of transformers or like one. Blocks once.

    They are those of the folder that it was loaded from. If it has none, its `eos_token` alone is known.
    """
    own = getattr(tokenizer, "eos_token", None)
    texts = _end_texts_in(str(getattr(tokenizer, "name_or_path", None) or "")) | ({own} if own else set())
    return tuple(sorted(texts))


@cache
def _end_texts_in(folder: str) -> frozenset[str]:
    if not folder or not (Path(folder) / "tokenizer.json").is_file():
        return frozenset()
    tokenizer = PretrainedTokenizer(folder)
    return frozenset(tokenizer.decode([each]) for each in tokenizer.end_ids)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {f"{name}_token": config.get(f"{name}_token") for name in SPECIAL_TOKENS}
    more = config.get("extra_special_tokens")
    texts = {name: _content(token) for name, token in {**named, **(more if isinstance(more, dict) else {})}.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _check_added(path: Path, config: Mapping[str, Any], id_of: Callable[[str], int | None]) -> None:
    """Check that `tokenizer.json` has every token that another file adds: transformers would number it anew."""
    listed = [
        config.get(name) for name in ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")
    ]
    values = [each for tokens in listed for each in (tokens.values() if isinstance(tokens, dict) else tokens or ())]
    added = [*map(_content, values), *_config(path / "added_tokens.json")]
    if absent := [token for token in added if isinstance(token, str) and id_of(token) is None]:
        raise InvalidConfig(
            f"{path / 'tokenizer.json'}: expected every token that the files beside it add, got none for "
            f"{absent[0]!r}: load the tokenizer by transformers, and save it again"
        )


def _template(path: Path, config: Mapping[str, Any]) -> Any:
    """Return the template, or templates by name as transformers reads them."""
    own = path / "chat_template.jinja"
    template = _text(own) if own.is_file() else config.get("chat_template")
    named = {each.stem: _text(each) for each in sorted((path / TEMPLATES).glob("*.jinja"))}
    if not named:
        return template
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}
    return {**({"default": template} if isinstance(template, str) else template or {}), **named}


def _loaded(path: Path) -> Any:
    if not path.is_file():
        raise InvalidConfig(f"{path}: expected a tokenizer saved by `save_pretrained(folder)`, got no such file")
    with extra("tokenizers", "PretrainedTokenizer"):
        import tokenizers  # noqa: PLC0415 (a policy without text does not need it)
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise InvalidConfig(f"{path}: expected a tokenizer, got {error}: save it again") from error
    loaded.no_padding()
    loaded.no_truncation()
    return loaded


def _merged(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with the special tokens of `special_tokens_map.json`, a file of older versions of transformers.

    As in transformers, they count before those of `config`, and not at all if `config` lists the added tokens.
    """
    if "added_tokens_decoder" in config:
        return dict(config)
    named = {f"{name}_token" for name in SPECIAL_TOKENS}
    return {**config, **{name: token for name, token in legacy.items() if name in named}}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{path}: expected text in UTF-8, got {error}: save it again") from error


def _config(path: Path) -> dict[str, Any]:
    return json_object(path) if path.is_file() else {}
