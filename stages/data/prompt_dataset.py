"""`PromptDataset`: the rows of a file or a list as prompts for `SourceEnv`, each with all its columns for the reward.

`PromptDataset` is a picklable description and the `make_env` of a source; each worker calls it and gets a `PromptSet`,
with the rows open. Number i of a source is row i % n of epoch i // n, n being the number of rows of the split; so
workers share the rows of an epoch, and a resumed run goes on in the middle of it. Knows no tokenizer: text is encoded
by the source, messages by the chat format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from ..._pipeline.errors import InvalidConfig, InvalidData
from ..._schemas.choices import check_choice
from ..._schemas.numbers import normalize_counts, normalize_numbers
from ..contracts.prompts import Prompt
from ..tokenizers.messages import Message, are_messages, asked, normalized
from .curriculum import Curriculum, RateFile
from .prompt_order import Shuffled, Split, split_rows
from .row_digests import digest_of
from .rows import Rows, Source, open_rows

LOOKED_AT = 64
"""A source is refused if none of so many rows at its beginning has a prompt; with fewer, each ends as failed."""


class PromptFormat(Protocol):
    """Converts messages to the tokens of a prompt: `penstock.chat.ChatFormat`."""

    def prompt(self, messages: Sequence[Message], /) -> Sequence[int]:
        """Return the tokens of `messages`, the beginning of the policy's turn included."""
        ...


class ChatRow(NamedTuple):
    """The messages of a row, answers included."""

    messages: Sequence[Message]
    data_source: str
    """The name of the set."""
    place: str
    """The set, the number of the row and the column, for messages of errors."""


@dataclass(frozen=True, slots=True)
class PromptDataset:
    """Prompts from the rows of a file or a list; every column reaches the reward.

    >>> rows = [{"question": "3+4=", "answer": 7}, {"question": "2+2=", "answer": 4}]
    >>> prompts = PromptDataset(rows, prompt="question", shuffle=False)()
    >>> prompts.prompt(3).content
    '2+2='
    >>> prompts.prompt(3).meta["row"]
    {'question': '2+2=', 'answer': 4}

    Raises:
        InvalidConfig: an unknown split, or a number out of range.
    """

    source: Source
    """A JSONL file, a Parquet file, a folder of Parquet files or of `datasets`, a sequence of mappings, or a data
    frame."""
    prompt: str = "prompt"
    """The column of the prompt: text, or a list of messages."""
    split: Split = "train"
    """The rows that are used: those for training, or those for evaluation."""
    evaluation: float = 0
    """Rows that are kept apart for evaluation: below 1 their share, from 1 on their number. They do not depend on
    `seed`, so that runs with different seeds keep the same rows apart."""
    seed: int = 0
    """Of the order; each epoch has another one."""
    shuffle: bool = True
    """True if the order is random; else it is that of the source."""
    chat: PromptFormat | None = None
    """Converts messages to tokens; text becomes a message of the user. Without it the text itself is the prompt."""
    system: str = ""
    """Text of a message of the system before each text; needs `chat`."""
    max_prompt_tokens: int | None = None
    """Bound on the tokens of a prompt; a longer one ends as rejected, and is not sampled."""
    curriculum: Curriculum | None = None
    """Leaves out rows by their rewards in the run, which a stage `SuccessRates` records; none leaves out no row."""
    name: str = ""
    """The `data_source` in the `meta` of its groups; by default the name of the file without its ending."""

    def __post_init__(self) -> None:
        """Check the fields."""
        normalize_counts(self, "max_prompt_tokens")
        normalize_counts(self, "seed", least=0)
        normalize_numbers(self, "evaluation", zero=True)
        if self.evaluation > 1 and self.evaluation % 1:
            raise InvalidConfig(
                f"PromptDataset.evaluation: expected a share below 1 or a whole number of rows, got {self.evaluation}"
            )
        check_choice("PromptDataset.split", self.split, Split)
        if self.split == "evaluation" and not self.evaluation:
            raise InvalidConfig("PromptDataset.evaluation: expected a share or a number with split='evaluation', got 0")
        if self.system and self.chat is None:
            raise InvalidConfig("PromptDataset.system: expected none without chat, got text")

    def __repr__(self) -> str:
        """Return a short text: the source may be a list of any length."""
        return f"<PromptDataset {self.data_source!r}: {self.split}, column {self.prompt!r}, seed {self.seed}>"

    @property
    def data_source(self) -> str:
        """Return the name of the set in the `meta` of its groups."""
        if self.name or not isinstance(self.source, str | Path):
            return self.name or "rows"
        return Path(self.source).stem

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of `chat`; None without one."""
        return getattr(self.chat, "tokenizer", None)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the rows, of their order, and of the fields that make a prompt of a row.

        Raises:
            InvalidData: the rows cannot be read.
            OSError: the file cannot be read.
        """
        order = {"shuffle": self.shuffle, "seed": self.seed if self.shuffle else None}
        split = {"split": self.split, "evaluation": self.evaluation}
        prompt = {"prompt": self.prompt, "system": self.system, "chat": self.chat is not None}
        rows = len(open_rows(self.source))
        return {"kind": "rows", "rows": rows, "digest": digest_of(self.source), **order, **split, **prompt}

    def __call__(self) -> PromptSet:
        """Open the rows.

        Raises:
            InvalidData: the source is of another kind than expected, has no rows, or its first rows have no prompt.
            OSError: the file cannot be read.
        """
        return PromptSet(self, open_rows(self.source))


class PromptSet:
    """The opened rows of one split of a `PromptDataset`. Any thread may use it."""

    def __init__(self, dataset: PromptDataset, rows: Rows) -> None:
        self._dataset = dataset
        self._rows = rows
        self._chosen = split_rows(len(rows), dataset.split, dataset.evaluation) if dataset.evaluation else None
        """The rows of the split; None for all."""
        self._check()
        self._order = Shuffled(len(self), dataset.seed) if dataset.shuffle else None
        self._rates = None if dataset.curriculum is None else RateFile(dataset.curriculum.path, len(self))

    def __repr__(self) -> str:
        return f"<PromptSet {self._dataset.data_source!r}: {len(self)} rows for {self._dataset.split}>"

    def __len__(self) -> int:
        """Return the number of rows of the split: an epoch."""
        return len(self._rows) if self._chosen is None else len(self._chosen)

    def prompt(self, number: int) -> Prompt:
        """Return prompt `number`; numbers go on from epoch to epoch.

        Raises:
            InvalidData: the row cannot be read, or its prompt is neither text nor messages.
        """
        place = self._place(number)
        prompt = self._prompt_of(self.row(place), self._index(place))
        reason = self._left_out(place, number // len(self))
        return msgspec.structs.replace(prompt, left_out=reason) if reason else prompt

    def _left_out(self, place: int, epoch: int) -> str:
        """Return why the curriculum leaves a row out of an epoch; empty if it does not."""
        curriculum, rates = self._dataset.curriculum, self._rates
        return "" if curriculum is None or rates is None else curriculum.reason(rates.read(place), place, epoch)

    def place_of(self, number: int) -> tuple[str, int]:
        """Return the name of the set, and the place of prompt `number` in it."""
        return self._dataset.data_source, self._place(number)

    def rows_of(self, _: str) -> int:
        """Return the number of rows of the split."""
        return len(self)

    def conversation(self, number: int) -> ChatRow:
        """Return the messages of row `number`, answers included; numbers go on from epoch to epoch.

        Raises:
            InvalidData: the row cannot be read, or has no messages.
        """
        place = self._place(number)
        index, content = self._index(place), self._content(self.row(place))
        if isinstance(content, str):
            raise InvalidData(f"{self._named(index)}: expected a list of messages with role and content, got text")
        return ChatRow(self._messages(content, index, normalized), self._dataset.data_source, self._named(index))

    def row_of(self, number: int) -> dict[str, Any]:
        """Return the row of prompt `number`, without its text.

        Raises:
            InvalidData: it cannot be read.
        """
        return self.row(self._place(number))

    def row(self, place: int) -> dict[str, Any]:
        """Return a row of the split by its place in the source's order, as the reward reads it.

        Raises:
            InvalidData: it cannot be read.
        """
        return dict(self._rows[self._index(place)])

    def _place(self, number: int) -> int:
        return number % len(self) if self._order is None else self._order.place(number)

    def _index(self, place: int) -> int:
        """Return the number of a row of the split in the source."""
        return place if self._chosen is None else int(self._chosen[place])

    def _check(self) -> None:
        dataset = self._dataset
        if not len(self):
            raise InvalidData(
                f"{dataset.data_source}: expected at least one row for {dataset.split}, got none of "
                f"{len(self._rows)} rows with evaluation={dataset.evaluation}"
            )
        problems = (self._problem(place) for place in range(min(len(self), LOOKED_AT)))
        first = next(problems)
        if first is not None and all(problems):
            raise first

    def _problem(self, place: int) -> InvalidData | None:
        """Return the reason that a row has no prompt; None if it has one."""
        try:
            self._content(self.row(place))
        except InvalidData as error:
            return error
        return None

    def _prompt_of(self, row: dict[str, Any], index: int) -> Prompt:
        dataset = self._dataset
        content = self._content(row)
        meta: dict[str, Any] = {"data_source": dataset.data_source, "row": row}
        if isinstance(content, str):
            meta["prompt"] = content  # functions get the form of the row, not that of the format
        if dataset.chat is not None:
            messages = self._messages(content, index)
            meta |= {} if isinstance(content, str) else {"messages": messages}
            content = dataset.chat.prompt(messages)
        return Prompt(content=content, meta=meta, max_tokens=dataset.max_prompt_tokens)

    def _content(self, row: Mapping[str, Any]) -> Any:
        """Return the value of the prompt's column, text or a list of messages."""
        dataset = self._dataset
        if dataset.prompt not in row:
            near = get_close_matches(dataset.prompt, row, n=3, cutoff=0.5) or list(row)
            raise InvalidData(
                f"{dataset.data_source}: expected the prompt in column {dataset.prompt!r}, which does not exist: set "
                f"prompt to one of {', '.join(map(repr, near))}"
            )
        content = row[dataset.prompt]
        if isinstance(content, str) or (dataset.chat is not None and are_messages(content)):
            return content
        expected = "text" if dataset.chat is None else "text or a list of messages with role and content"
        advice = (
            ": messages need PromptDataset(chat=ChatFormat(…))"
            if dataset.chat is None and are_messages(content)
            else ""
        )
        raise InvalidData(
            f"{dataset.data_source}: expected {expected} in column {dataset.prompt!r}, got "
            f"{type(content).__name__}{advice}"
        )

    def _messages(
        self, content: Any, index: int, read: Callable[[Sequence[Message]], list[dict[str, Any]]] = asked
    ) -> Sequence[Message]:
        """Return the messages of a row as `read` returns them, after that of the system."""
        said = [{"role": "user", "content": content}] if isinstance(content, str) else content
        try:
            messages = read(said)
        except InvalidData as error:
            raise InvalidData(f"{self._named(index)}: {error}") from None
        if self._dataset.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._dataset.system})
        return messages

    def _named(self, index: int) -> str:
        return f"{self._dataset.data_source}: row {index}, column {self._dataset.prompt!r}"
