"""The messages of Atropos' HTTP contract: requests and answers of trainers and environments, and scored data.

`decode` and `decode_scored` accept bodies that the original server accepts: "7", 7.0 and true as whole numbers; unknown
fields (they drop these); scored data of any lengths, if each message has a role and a content. `translation` checks
whether a group can be trained on, and raises `Untrainable`. Knows neither groups nor queues nor sockets.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, get_type_hints

import msgspec

from ...._schemas import InvalidRecord
from ...._schemas.conversion import convert, decode_json
from ...._schemas.errors import UNREADABLE

UNTRAINED = -100
"""Value of `masks` at positions that do not train."""

NO_LOGPROB = 1.0
"""Value of `inference_logprobs` at positions that do not train."""

SHM_PATH = "/shm"
"""Endpoint of a gateway that environments on its host ask for the address of its shared-memory receiver."""

Rows: TypeAlias = list[list[int]]
FloatRows: TypeAlias = list[list[float]]

T = TypeVar("T")


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


class RootAnswer(msgspec.Struct, frozen=True):
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
    """Lease to acknowledge, for a client that asked for one; not part of the original server."""
    batch_id: str | msgspec.UnsetType = msgspec.UNSET
    """Present beside a lease. It stays the same when the batch is leased again; no other batch has it."""
    status: str | msgspec.UnsetType = msgspec.UNSET
    """`error` where no trainer is registered."""
    message: str | msgspec.UnsetType = msgspec.UNSET
    """Instruction that goes with the status `error`."""


class SubmitAnswer(msgspec.Struct, frozen=True):
    """Answers /scored_data and /scored_data_list; only the fields that a sender reads."""

    status: str
    rejected: tuple[str, ...] = ()
    """Reasons for groups that cannot be trained on; the others were accepted. The original trains on any group."""


class ShmAnswer(msgspec.Struct, frozen=True):
    """Answers GET /shm; only a gateway has this endpoint."""

    url: str
    """Address of its shared-memory receiver: argument of `connect`."""


# -- scored data -------------------------------------------------------------------------------------------------------


Fault: TypeAlias = Literal["sequences", "lengths", "masks", "logprobs", "numbers", "teacher", "temperature", "record"]
"""Reason that a group cannot be trained on: no sequences; lists of unequal lengths; `masks` that hold another token;
log-probabilities above 0; numbers that are not finite or too large; a teacher's candidates; a temperature below 0;
another rule of `TrajectoryGroup`."""


class Untrainable(InvalidRecord):
    """A group is valid in the contract, and cannot be trained on; the message names the field."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault
        """The kind of fault; few values, so that a counter or a log can use it as its key."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fault, str(self))


class ScoredData(msgspec.Struct, kw_only=True):
    """A group as an environment sends it: S sequences, L tokens of each. An optional field that is empty is absent.

    Raises:
        ValueError: a message has no role or no content.
    """

    tokens: Rows
    """[S][L]."""
    masks: Rows
    """[S][L] −100 at positions that do not train, the token elsewhere."""
    scores: list[float]
    """[S]."""
    advantages: FloatRows | None = None
    """[S][L]."""
    ref_logprobs: FloatRows | None = None
    """[S][L]."""
    inference_logprobs: FloatRows | None = None
    """[S][L] 1.0 at positions that do not train."""
    messages: list[list[dict[str, Any]]] | None = None
    """[S][turns], each with a role, a content (null is allowed) and any other keys."""
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
    """Names of the fields that may be absent."""

    def __post_init__(self) -> None:
        for turns in self.messages or ():
            for message in turns:
                if "role" not in message or "content" not in message:
                    raise ValueError(f"messages: expected a role and a content in each, got only {sorted(message)}")

    def json(self) -> bytes:
        """Return the group as `/batch` answers it: every field, absent ones as null."""
        return msgspec.json.encode(self)


ScoredData.optional = tuple(field.name for field in msgspec.structs.fields(ScoredData) if not field.required)

BY_TOKEN = ("masks", "advantages", "ref_logprobs", "inference_logprobs", "distill_token_ids", "distill_logprobs")
"""Fields with an entry for each token."""

COLUMNS = ("tokens", "scores", *BY_TOKEN)
"""Fields that become columns of a group; the others go into its `meta`."""

_Meta = msgspec.defstruct(
    "_Meta",
    [(name, kind, None) for name, kind in get_type_hints(ScoredData).items() if name not in (*COLUMNS, "optional")],
)


def decode_scored(body: bytes) -> list[ScoredData]:
    """Return the groups in the body of /scored_data or /scored_data_list, all of them or none.

    >>> decode_scored(b'{"tokens": [[5, 6]], "masks": [[-100, 6]], "scores": ["1"]}')[0].scores
    [1.0]

    Raises:
        InvalidRecord: naming the field, the expected type and the value. The original answers it with 422, too.
    """
    if body.lstrip()[:1] == b"[":
        return decode(body, list[ScoredData])
    return [decode(body, ScoredData)]


def scored_data(values: Mapping[str, Any]) -> ScoredData:
    """Return a group as an environment holds it before it is sent; fields of other names are left out.

    Fields that become columns are not copied, and their values not checked before they are translated. The others are
    converted as if they had been sent as JSON.

    Raises:
        InvalidRecord: as in `decode_scored`.
    """
    if absent := [name for name in ("tokens", "masks", "scores") if name not in values]:
        raise InvalidRecord(f"expected tokens, masks and scores, got no {' and no '.join(absent)}")
    meta = {name: values.get(name) for name in _Meta.__struct_fields__}
    try:
        body = json.dumps(meta, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRecord(
            f"{', '.join(meta)}: expected values that JSON can represent, got others: {error}"
        ) from None
    columns = {name: values[name] for name in COLUMNS if name in values}
    try:
        return ScoredData(**columns, **msgspec.structs.asdict(decode(body, _Meta)))
    except ValueError as error:
        raise InvalidRecord(str(error)) from None


# -- decoding ----------------------------------------------------------------------------------------------------------


_NOT_JSON = re.compile(rb"-?(?:NaN|Infinity)\b")
"""Numbers that Python's json writes and JSON does not have."""

_POSITION = re.compile(r"\(byte (\d+)\)")
_KEY = re.compile(rb'"(\w+)"\s*:')


def decode(body: bytes, wanted: type[T]) -> T:
    """Return `body` as a `wanted`.

    A body that fits its type is decoded in one pass. Only one that does not is decoded a second time, value by value:
    coercion costs time only if it is needed.

    >>> decode(b'["7", 7.0, true]', list[int])
    [7, 7, 1]

    Raises:
        InvalidRecord: it is not JSON, or does not fit; the message names the place, the expected type and the value.
    """
    try:
        return decode_json(body, wanted)
    except msgspec.ValidationError:
        return _coerce(body, wanted)
    except UNREADABLE as error:
        raise InvalidRecord(_explain(body, error)) from None


def _coerce(body: bytes, wanted: type[T]) -> T:
    try:
        return convert(_coerce_value(msgspec.json.decode(body), msgspec.inspect.type_info(wanted)), wanted)
    except msgspec.ValidationError as error:
        raise InvalidRecord(f"body: {_lowered(str(error))}") from None
    except UNREADABLE as error:
        raise InvalidRecord(_explain(body, error)) from None


def _coerce_value(value: Any, wanted: msgspec.inspect.Type) -> Any:
    """Return `value` with numbers where `wanted` has them and the conversion is exact."""
    match wanted:
        case msgspec.inspect.IntType():
            value = _coerce_number(value, int)
        case msgspec.inspect.FloatType():
            value = _coerce_number(value, float)
        case msgspec.inspect.ListType(item_type=item) if isinstance(value, list):
            value = [_coerce_value(each, item) for each in value]
        case msgspec.inspect.StructType() if isinstance(value, dict):
            types = {field.encode_name: field.type for field in wanted.fields}
            value = {name: _coerce_value(each, types[name]) for name, each in value.items() if name in types}
        case msgspec.inspect.UnionType(types=types) if value is not None:
            kinds = [kind for kind in types if not isinstance(kind, msgspec.inspect.NoneType)]
            value = _coerce_value(value, kinds[0]) if len(kinds) == 1 else value
    return value


def _coerce_number(value: Any, wanted: type[int | float]) -> Any:
    if isinstance(value, bool):
        return wanted(value)
    if isinstance(value, str | float):
        with suppress(msgspec.ValidationError):
            number = convert(value.strip() if isinstance(value, str) else value, wanted, strict=False)
            return number if math.isfinite(number) else value
    return value


def _explain(body: bytes, error: Exception) -> str:
    """Return the error message for a `body` that is not JSON, with the place."""
    found = _POSITION.search(str(error))
    if found is None:
        return f"body: expected JSON, got {len(body)} bytes that are none: {_lowered(str(error))}"
    at = int(found[1])
    if literal := _NOT_JSON.match(body, max(0, at - 1)) or _NOT_JSON.match(body, at):
        keys = _KEY.findall(body, 0, at)
        where = f"{keys[-1].decode()}: " if keys else ""
        return (
            f"{where}expected finite numbers, got {literal[0].decode()} at byte {literal.start()}: JSON has no such "
            f"number, and none can be trained on; have the environment drop the group, or send a number"
        )
    return f"body: expected JSON, got {body[max(0, at - 20) : at + 20]!r} around byte {at}: {error}"


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]
