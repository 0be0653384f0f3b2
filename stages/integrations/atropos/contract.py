"""What Atropos' HTTP contract says: what trainers and environments ask for, and the scored data that they exchange.

Requests are read as the original server reads them, see `lax`. What it says of queues is in `records`.
`decode_scored` holds what environments send to the rules that the original never checked: lists over sequences and
over tokens have one length, and every number is finite. Knows nothing of groups, queues and sockets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from types import UnionType
from typing import Any, ClassVar, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from ....schemas import InvalidRecord
from ....schemas.errors import UNREADABLE
from .lax import decode_request, explained, lenient, plain

__all__ = [
    "NO_LOGPROB",
    "UNTRAINED",
    "BatchAnswer",
    "Buffered",
    "Disconnected",
    "EnvReference",
    "EnvRegistered",
    "EnvRegistration",
    "Greeting",
    "ListReceived",
    "Received",
    "Registered",
    "ScoredData",
    "TrainerRegistration",
    "decode_request",
    "decode_scored",
    "scored_data",
]

UNTRAINED = -100
"""What `masks` hold where nothing trains."""

NO_LOGPROB = 1.0
"""What `inference_logprobs` hold where nothing trains."""

Rows: TypeAlias = list[list[int]]
FloatRows: TypeAlias = list[list[float]]


class TrainerRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """POST /register."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    """Sequences of a batch."""
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class EnvRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """POST /register-env."""

    max_token_length: int
    desired_name: str
    weight: float
    group_size: int
    min_batch_allocation: float | None = None


class EnvReference(msgspec.Struct, frozen=True):
    """POST /disconnect-env, and GET /status-env."""

    env_id: int


# -- answers -----------------------------------------------------------------------------------------------------------


class Greeting(msgspec.Struct, frozen=True):
    """Answers GET /."""

    message: str


class Registered(msgspec.Struct, frozen=True):
    """Answers /register."""

    uuid: int
    """128 bits."""


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answers /batch."""

    batch: list[msgspec.Raw] | None
    """Groups, each as JSON; None where there are too few. Empty where no trainer is registered."""
    lease: int | str | msgspec.UnsetType = msgspec.UNSET
    """What a client that asked for a lease acknowledges; the original server has none."""
    batch_id: str | msgspec.UnsetType = msgspec.UNSET
    """Beside a lease: stays when the batch is handed out again, under another lease; no other batch ever has it."""
    status: str | msgspec.UnsetType = msgspec.UNSET
    """`error` where no trainer is registered."""
    message: str | msgspec.UnsetType = msgspec.UNSET
    """What to do then."""


class EnvRegistered(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answers /register-env: as a success with everything, or with the wish to wait and nothing more."""

    status: str
    env_id: int | msgspec.UnsetType = msgspec.UNSET
    wandb_name: str | msgspec.UnsetType = msgspec.UNSET
    checkpoint_dir: str | msgspec.UnsetType = msgspec.UNSET
    starting_step: int | msgspec.UnsetType = msgspec.UNSET
    checkpoint_interval: int | msgspec.UnsetType = msgspec.UNSET
    num_steps: int | msgspec.UnsetType = msgspec.UNSET


class Disconnected(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answers /disconnect-env."""

    status: str
    error: str | msgspec.UnsetType = msgspec.UNSET


class Received(msgspec.Struct, frozen=True):
    """Answers /scored_data: the group is in the queue."""

    status: str = "received"


class Buffered(msgspec.Struct, frozen=True):
    """Answers /scored_data: the group waits for others that make a whole one with it."""

    buffer_size: int
    """Sequences that wait."""
    status: str = "buffered"


class ListReceived(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answers /scored_data_list; the last two where something was buffered."""

    status: str
    groups_processed: int
    buffered: int | msgspec.UnsetType = msgspec.UNSET
    last_buffer_size: int | msgspec.UnsetType = msgspec.UNSET


# -- scored data -------------------------------------------------------------------------------------------------------


class ScoredData(msgspec.Struct, kw_only=True):
    """A group as environments send it. S sequences, L tokens of each; absent is None, however it was sent."""

    tokens: Rows
    """[S][L]."""
    masks: Rows
    """[S][L] −100 where nothing trains, the token elsewhere."""
    scores: list[float]
    """[S]."""
    advantages: FloatRows | None = None
    """[S][L]."""
    ref_logprobs: FloatRows | None = None
    """[S][L]."""
    inference_logprobs: FloatRows | None = None
    """[S][L] 1.0 where nothing trains."""
    messages: list[list[dict[str, Any]]] | None = None
    """[S][turns], each with a role and a content."""
    generation_params: dict[str, Any] | None = None
    overrides: list[dict[str, Any]] | None = None
    """[S]."""
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[Rows] | None = None
    """[S][L][K], K of each token's own."""
    distill_logprobs: list[FloatRows] | None = None
    """[S][L][K]."""

    optional: ClassVar[tuple[str, ...]]
    """Fields that may be absent."""

    def json(self) -> bytes:
        """The group as `/batch` answers it: every field, absent ones as null."""
        return msgspec.json.encode(self)


ScoredData.optional = tuple(field.name for field in msgspec.structs.fields(ScoredData) if not field.required)


class _Verbatim(ScoredData, kw_only=True):
    """One that was sent as it should be: what a trainer is sent is what came, with null for what did not."""

    body: bytes
    unsent: tuple[str, ...]

    def json(self) -> bytes:
        """See `ScoredData`."""
        ends = "".join(f',"{name}":null' for name in self.unsent).encode()
        return b"%b%b}" % (self.body.strip()[:-1], ends) if ends else self.body


def _as_written(kind: Any) -> Any:
    """`kind` with whole numbers still whole where any number is wanted."""
    if kind is float:
        return int | float
    parts = tuple(map(_as_written, get_args(kind)))
    if not parts:
        return kind
    return reduce(or_, parts) if isinstance(kind, UnionType) else get_origin(kind)[parts]


_KINDS = get_type_hints(ScoredData)

_Sent = msgspec.defstruct(
    "_Sent",
    [
        (name, _as_written(kind) | msgspec.UnsetType, msgspec.UNSET)
        if name in ScoredData.optional
        else (name, _as_written(kind))
        for name, kind in _KINDS.items()
        if name != "optional"
    ],
    forbid_unknown_fields=True,
)
"""What `ScoredData` is decoded by: it knows what was sent as null from what was not sent, and 1 from 1.0."""

WORDS = ("messages", "generation_params", "overrides", "group_overrides", "images", "env_id")
"""What a group holds that is no list over sequences and tokens."""

_Words = msgspec.defstruct("_Words", [(name, _KINDS[name], None) for name in WORDS])

_decode_sent = msgspec.json.Decoder(_Sent).decode
_decode_known = msgspec.json.Decoder(ScoredData).decode
_decode_pieces = msgspec.json.Decoder(list[msgspec.Raw]).decode

BY_TOKEN = ("masks", "advantages", "ref_logprobs", "inference_logprobs", "distill_token_ids", "distill_logprobs")
"""Fields with an entry for every token."""

FLOATS = {"scores": 1, "advantages": 2, "ref_logprobs": 2, "inference_logprobs": 2, "distill_logprobs": 3}
"""Fields of numbers that need not be whole, and so many lists deep."""


def decode_scored(body: bytes) -> list[ScoredData]:
    """The groups in the body of /scored_data or /scored_data_list, all of them or none.

    >>> decode_scored(b'{"tokens": [[5, 6]], "masks": [[-100, 6]], "scores": ["1"]}')[0].scores
    [1.0]

    Raises:
        InvalidRecord: naming the field, what was expected and what came. It is a 422.
    """
    if body.lstrip()[:1] != b"[":
        return [_decoded(body)]
    try:
        pieces = _decode_pieces(body)
    except UNREADABLE as error:
        raise InvalidRecord(explained(body, error)) from None
    return [_of_list(index, bytes(piece)) for index, piece in enumerate(pieces)]


def scored_data(values: Mapping[str, Any]) -> ScoredData:
    """A group as an environment holds it before it is sent; fields of other names are left out.

    Lists over tokens are taken as they are, all else as it would come as JSON.

    Raises:
        InvalidRecord: as `decode_scored`, but that what its lists hold is looked at when they are made columns.
    """
    return _assembled({**values, **_worded(values)})


def _worded(values: Mapping[str, Any]) -> dict[str, Any]:
    said = {name: value for name in WORDS if not _says_nothing(value := values.get(name))}
    if not said:
        return {}
    try:
        body = json.dumps(said, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRecord(f"{', '.join(said)}: expected what JSON can say, got other: {error}") from None
    return msgspec.structs.asdict(decode_request(body, _Words))


def _assembled(values: Mapping[str, Any]) -> ScoredData:
    absent = [name for name in ("tokens", "masks", "scores") if name not in values]
    if absent:
        raise InvalidRecord(f"expected tokens, masks and scores, got no {' and no '.join(absent)}")
    given = {name: value for name in ScoredData.optional if not _says_nothing(value := values.get(name))}
    try:
        return _checked(ScoredData(tokens=values["tokens"], masks=values["masks"], scores=values["scores"], **given))
    except TypeError as error:
        raise InvalidRecord(f"expected lists, with one list for each sequence, got others ({error})") from None


def _of_list(index: int, piece: bytes) -> ScoredData:
    try:
        return _decoded(piece)
    except InvalidRecord as error:
        raise InvalidRecord(f"group {index}: {error}") from None


def _decoded(body: bytes) -> ScoredData:
    try:
        sent = msgspec.structs.asdict(_decode_sent(body))
    except msgspec.ValidationError:
        sent = {}
    except UNREADABLE as error:
        raise InvalidRecord(explained(body, error)) from None
    if not sent or any(_holds_a_whole_number(sent[name], lists) for name, lists in FLOATS.items()):
        return _assembled(msgspec.structs.asdict(_patiently(body)))
    unsent = tuple(name for name, value in sent.items() if value is msgspec.UNSET)
    for name in ScoredData.optional:
        if name in unsent or _says_nothing(sent[name]):
            sent[name] = None
    return _checked(_Verbatim(body=body, unsent=unsent, **sent))


def _holds_a_whole_number(column: Any, lists: int) -> bool:
    """Whether a trainer would get one where the original sends 1.0, which tensors are made of otherwise."""
    if column is None or column is msgspec.UNSET:
        return False
    for _ in range(1, lists):
        column = chain.from_iterable(column)
    return int in map(type, column)


def _patiently(body: bytes) -> ScoredData:
    """One with fields that nobody knows, with numbers in other forms, or wrong."""
    try:
        return _decode_known(body)
    except msgspec.ValidationError:
        return lenient(plain(body), ScoredData)


def _says_nothing(value: Any) -> bool:
    """Whether an optional field with this value is absent."""
    return value is None or (isinstance(value, list | dict) and not value)


def _checked(scored: ScoredData) -> ScoredData:
    """The same, once its lists are found to be of one length."""
    sequences = len(scored.tokens)
    if not sequences:
        raise InvalidRecord("tokens: expected at least one sequence, got none")
    for name in ("scores", "overrides"):
        if (found := getattr(scored, name)) is not None and len(found) != sequences:
            raise InvalidRecord(f"{name}: expected {sequences}, one for each sequence of tokens, got {len(found)}")
    lengths = [*map(len, scored.tokens)]
    for name in BY_TOKEN:
        if (rows := getattr(scored, name)) is not None and [*map(len, rows)] != lengths:
            _tell_lengths(name, rows, lengths)
    if (scored.distill_token_ids is None) != (scored.distill_logprobs is None):
        raise InvalidRecord("distill_token_ids, distill_logprobs: expected both or neither, got one")
    for turns in scored.messages or ():
        _check_messages(turns)
    return scored


def _tell_lengths(name: str, rows: Sequence[Sequence[Any]], lengths: Sequence[int]) -> None:
    if len(rows) != len(lengths):
        raise InvalidRecord(f"{name}: expected {len(lengths)} lists, one for each sequence of tokens, got {len(rows)}")
    row = next(row for row, length in enumerate(lengths) if len(rows[row]) != length)
    raise InvalidRecord(
        f"{name}[{row}]: expected {lengths[row]} entries, one for each of tokens[{row}], got {len(rows[row])}"
    )


def _check_messages(turns: Sequence[Mapping[str, Any]]) -> None:
    for turn in turns:
        if "role" not in turn or "content" not in turn:
            raise InvalidRecord(f"messages: expected a role and a content in each, got only {sorted(turn)}")
        if not isinstance(role := turn["role"], str):
            raise InvalidRecord(f"messages: expected text as role, got {role!r}")
        content = turn["content"]
        if not (
            isinstance(content, str) or (isinstance(content, list) and all(isinstance(one, dict) for one in content))
        ):
            raise InvalidRecord(f"messages: expected text or a list of parts as content, got {content!r:.60}")
