"""The layout of the columns of records: the facts that a receiver must know before it can read a span.

A *schema* is a table of rules for the columns that a kind of record may have. A *form* is the columns that one record
has, with their dtypes and axes; a run uses few forms, so each is checked once. A *layout* is a form with the lengths of
its axes: the begin and end of each column. The columns lie one after another, each on a cache line of its own, followed
by the `BundleHeader` with form and lengths (docs/decisions/0002).

Several records of one form may lie together, as a *bundle*: then a column holds the part of the first record, then that
of the second, and so on (docs/decisions/0005).

Axes: N tokens, S sequences, F offsets (S + 1 of each record), K teacher candidates a token, L layers with experts, E of
which each chooses for a token, W tokens that a token was drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, is_, itemgetter, mul
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from .bounds import MOST_NAMES, Count, Name, Payload
from .columns import Array, ColumnRule, check_axes, contiguous
from .errors import UNREADABLE, InvalidRecord
from .ids import MAX_REPETITION_ID

ALIGNMENT = 64
"""Bytes: every column begins on a cache line."""

DTYPES: tuple[np.dtype[Any], ...] = tuple(
    map(np.dtype, (np.int64, np.int32, np.float32, np.uint8, np.bool_, np.uint16))
)
"""The dtypes that travel. Bytes of a peer become arrays of these only."""

CACHED_FORMS = 64
"""Forms that are cached; a peer that sends more invents them, and each is checked again."""

CACHED_COLUMNS = 256
"""Columns of a form that is cached: a peer may invent any number of parts."""

CACHED_PLACES = 16_384
"""Columns in the cached layouts of one form: groups of one size recur, others cost 3 µs."""

MOST_RECORDS = 2**16 - 1
"""Records in a bundle: the header of a slot counts them in 16 bits."""

MOST_CANDIDATES = 2**20
"""Teacher candidates a token, or tokens that it was drawn from: more than any vocabulary has. Where there are no
tokens, no bytes bound them."""

MOST_LAYERS, MOST_EXPERTS = 2**12, 2**16
"""Layers with experts, and experts that a layer chooses for a token: more than any model has."""

AXES = ("N", "S", "F", "NK", "NLE", "NW")
"""The axes, in the order of `AxisSizes.items`."""

FRAME_BYTES = 2**16
"""Bytes of the columns that share a frame of a message, at most; a larger column has a frame of its own. A frame is
encrypted, sent and received by itself, which costs as much as copying some ten KiB."""

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")

_ITEM_BYTES = tuple(dtype.itemsize for dtype in DTYPES)
_INDEX = {dtype: index for index, dtype in enumerate(DTYPES)}


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to the alignment."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def typed(memory: memoryview) -> list[Any]:
    """Return `memory` item by item, for each of DTYPES: a column is copied fastest into a slice of its own type."""
    return [_cast(memory, dtype.char) for dtype in DTYPES]


def copy_into(items: Any, first: int, last: int, column: Array) -> None:
    """Copy a column into a view of `typed`, as its items from `first` to before `last`.

    Raises:
        TypeError, ValueError: the column is no array of that type and size.
    """
    try:
        items[first:last] = column
    except ValueError:  # it begins at an odd address, which is too rare to check for
        items[first:last] = column.copy()


def _cast(view: memoryview, item: Any) -> memoryview:
    return view.cast(item)


Items: TypeAlias = tuple[int, int, int, int, int, int]
"""Entries of a column over each of `AXES`."""


class Widths(NamedTuple):
    """The lengths of the axes behind that over tokens, in columns with several; 0 for those of absent columns."""

    candidates: int = 0
    """Teacher candidates a token."""
    layers: int = 0
    """Layers with experts."""
    experts: int = 0
    """Experts that each of them chooses for a token."""
    support: int = 0
    """Tokens that a token was drawn from, at most."""

    def shape_of(self, axes: str) -> tuple[int, ...]:
        """Return the shape of a token's part of a column over `axes`."""
        return {"NK": (self.candidates,), "NLE": (self.layers, self.experts), "NW": (self.support,)}[axes]

    def items_of(self, axes: str | None) -> int:
        """Return the entries of a token in a column over `axes`; 1 for None, a column over tokens alone."""
        return 1 if axes is None else math.prod(self.shape_of(axes))


class AxisSizes(NamedTuple):
    """The lengths of the axes of a record, or of several that lie together."""

    tokens: int
    sequences: int
    widths: Widths = Widths()
    records: int = 1

    def items(self) -> Items:
        """Return the entries of a column over each of `AXES`."""
        tokens, sequences, (candidates, layers, experts, support), records = self
        behind = tokens * candidates, tokens * layers * experts, tokens * support
        return tokens, sequences, sequences + records, *behind


Length: TypeAlias = Count


class BundleEntry(NamedTuple):
    """One record of a bundle: the lengths of its axes, and the fields that are not columns."""

    tokens: Length
    sequences: Length
    header: Payload


class BundleHeader(NamedTuple):
    """The description that follows the columns of a bundle."""

    kind: Name
    form: Payload
    """A `ColumnLayout`, encoded."""
    candidates: Length
    """Teacher candidates a token."""
    parts: Annotated[tuple[BundleEntry, ...], msgspec.Meta(max_length=MOST_RECORDS)]
    """The records, in order."""
    layers: Length = 0
    """Layers with experts."""
    experts: Length = 0
    """Experts that each of them chooses for a token."""
    support: Length = 0
    """Tokens that a token was drawn from, at most."""

    @classmethod
    def of(cls, kind: str, form: ColumnLayout, widths: Widths, parts: Sequence[tuple[int, int, bytes]]) -> BundleHeader:
        """Return the header of a bundle of `parts`, a `BundleEntry` each."""
        return cls(kind, form.encoded, widths.candidates, parts, *widths[1:])  # type: ignore[arg-type]  # they travel alike

    @classmethod
    def alone(cls, kind: str, form: ColumnLayout, lengths: AxisSizes, header: bytes) -> BundleHeader:
        """Return the header of a bundle of one record."""
        return cls.of(kind, form, lengths.widths, (BundleEntry(lengths.tokens, lengths.sequences, header),))

    @classmethod
    def decode(cls, encoded: bytes | memoryview) -> BundleHeader:
        """Return the header that the bytes hold.

        Raises:
            InvalidRecord: the bytes are no contents.
        """
        try:
            return _decode(encoded)
        except UNREADABLE as error:
            raise InvalidRecord(
                f"contents: expected (kind, form, candidates, parts, layers, experts, support), got {error}"
            ) from None

    def lengths(self) -> AxisSizes:
        """Return the lengths of the axes of all records together."""
        parts = self.parts
        return AxisSizes(
            sum([part.tokens for part in parts]), sum([part.sequences for part in parts]), self.widths, len(parts)
        )

    @property
    def widths(self) -> Widths:
        """Return the lengths of the axes behind that over tokens."""
        return Widths(self.candidates, self.layers, self.experts, self.support)


encode_contents = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BundleHeader).decode

FormColumn: TypeAlias = tuple[Name, Name, Name]
"""Name, dtype, axes."""

_encode_form = msgspec.msgpack.Encoder().encode
_decode_form = msgspec.msgpack.Decoder(Annotated[tuple[FormColumn, ...], msgspec.Meta(max_length=MOST_NAMES)]).decode


L = TypeVar("L")

Place: TypeAlias = tuple[int, int, int]
"""The place of a column: its dtype, as an index into `DTYPES`, and its first and last item, counted in items."""


class Layout(NamedTuple):
    """The places of columns, counted from the first."""

    nbytes: int
    places: tuple[Place, ...]


class Framing(NamedTuple):
    """The columns of a message, divided into frames."""

    frames: tuple[int, ...]
    """Bytes of each frame; one of more than `FRAME_BYTES` is one column."""
    places: tuple[tuple[int, Place], ...]
    """The frame of each column, and its place in there."""


class ColumnLayout:
    """The columns that a record has, in order, with their dtypes and axes."""

    def __init__(self, columns: Sequence[tuple[str, np.dtype[Any], str]]) -> None:
        self.names: tuple[str, ...] = tuple(name for name, _, _ in columns)
        self.encoded: bytes = _encode_form([(name, dtype.str, axes) for name, dtype, axes in columns])
        """The encoded form, as it travels."""
        self.shaped: dict[str, str] = {name: axes for name, _, axes in columns if len(axes) > 1}
        """The axes of columns with more than one."""
        self.versions_by_token: bool = ("policy_versions", "N") in [(name, axes) for name, _, axes in columns]
        """True if weights changed mid-rollout."""
        self.axes: tuple[int, ...] = tuple(AXES.index(axes) for _, _, axes in columns)
        """The axes of each column, as an index into `AXES`."""
        self._offsets = next((place for place, (_, _, axes) in enumerate(columns) if axes == "F"), -1)
        self._rollouts = self.names.index("rollout_ids") if "rollout_ids" in self.names else -1
        self._dtypes = tuple(_INDEX[dtype] for _, dtype, _ in columns)
        self.dtypes: tuple[np.dtype[Any], ...] = tuple(DTYPES[index] for index in self._dtypes)
        """The dtype of each column: the same objects as in DTYPES."""
        self._weights = [sum(dtype.itemsize for _, dtype, over in columns if over == axes) for axes in AXES]
        """Bytes of an item of all columns over each of `AXES`."""
        self._layouts: dict[AxisSizes, Layout] = {}
        self._framings: dict[AxisSizes, Framing] = {}

    def layout(self, lengths: AxisSizes) -> Layout:
        """Return the layout of columns of these lengths.

        Raises:
            InvalidRecord: a length is negative.
        """
        return self._layouts.get(lengths) or self._cached(self._layouts, lengths, self._lay_out)

    def framing(self, lengths: AxisSizes) -> Framing:
        """Return the division of columns of these lengths into the frames of a message.

        Raises:
            InvalidRecord: a length is negative.
        """
        return self._framings.get(lengths) or self._cached(self._framings, lengths, self._divide)

    def _cached(self, cache: dict[AxisSizes, L], lengths: AxisSizes, make: Callable[[Items], L]) -> L:
        tokens, sequences, widths, records = lengths
        if min(tokens, sequences, *widths, records) < 0:
            raise InvalidRecord(f"lengths: expected 0 or more, got {lengths}")
        if len(cache) * len(self.names) >= CACHED_PLACES:
            cache.clear()
        made = cache[lengths] = make(lengths.items())
        return made

    def _divide(self, items: Items) -> Framing:
        frames, places, shared = list[int](), [], -1
        for index, axes in zip(self._dtypes, self.axes, strict=True):
            size = items[axes]
            nbytes = size * _ITEM_BYTES[index]
            # 1. It is too large to be copied, and has a frame of its own.
            if nbytes > FRAME_BYTES:
                places.append((len(frames), (index, 0, size)))
                frames.append(nbytes)
                continue
            # 2. It has no room in the frame that is shared now, and begins another one.
            if shared < 0 or frames[shared] + nbytes > FRAME_BYTES:
                shared = len(frames)
                frames.append(0)
            # 3. It shares a frame.
            first = frames[shared] // _ITEM_BYTES[index]
            places.append((shared, (index, first, first + size)))
            frames[shared] = aligned(frames[shared] + nbytes)
        return Framing(tuple(frames), tuple(places))

    def _lay_out(self, items: Items) -> Layout:
        places, offset = [], 0
        for index, axes in zip(self._dtypes, self.axes, strict=True):
            first, size = offset // _ITEM_BYTES[index], items[axes]
            places.append((index, first, first + size))
            offset = aligned(offset + size * _ITEM_BYTES[index])
        return Layout(offset, tuple(places))

    def nbytes(self, lengths: AxisSizes) -> int:
        """Return the bytes of columns of these lengths, without alignment."""
        return sum(map(mul, lengths.items(), self._weights))

    @property
    def slack(self) -> int:
        """Return the bytes that aligning the columns takes at most."""
        return (ALIGNMENT - 1) * len(self.names)

    def within(self, places: Iterable[Place], first: Items, last: Items) -> tuple[Place, ...]:
        """Return the places of some records of a bundle at `places`: from `first` to before `last` on each axis."""
        return tuple(
            [
                (index, begin + first[axes], begin + last[axes])
                for (index, begin, _), axes in zip(places, self.axes, strict=True)
            ]
        )

    def view(self, places: Iterable[Place], payload: Array, widths: Widths) -> dict[str, Array]:
        """Return the columns as views into `payload` (uint8, a whole number of cache lines that holds them all)."""
        typed = [payload.view(dtype) for dtype in DTYPES]
        return self._shape([typed[index][first:last] for index, first, last in places], widths)

    def check_numbers(self, columns: Sequence[Any], parts: Sequence[BundleEntry]) -> None:
        """Check the numbers of `parts`, one after the other, that are used as counts or as indices.

        Raises:
            InvalidRecord: a record has no sequences; its offsets do not run from 0 to its tokens, or decrease; or a
                repetition id is beyond those that the ledger counts.
        """
        offsets: list[int] = columns[self._offsets].tolist()
        first = 0
        for tokens, sequences, _ in parts:
            check_sequences(sequences)
            last = first + sequences
            check_offsets(self.names[self._offsets], offsets[first : last + 1], tokens)
            first = last + 1
        check_rollout_ids(np.asarray(columns[self._rollouts]))

    def _shape(self, flat: Iterable[Array], widths: Widths) -> dict[str, Array]:
        columns = dict(zip(self.names, flat, strict=True))
        for name, axes in self.shaped.items():
            columns[name] = columns[name].reshape(len(columns["tokens"]), *widths.shape_of(axes))
        return columns

    def contiguous(self, lengths: AxisSizes, columns: Iterable[Any]) -> bool:
        """Return whether columns have one axis and fit this form and `lengths`; `Schema.contiguous` makes them so.

        A dtype that only equals one of `DTYPES` does not: int64 under the name of `longlong` is another type in C.
        """
        return not self.shaped and all(
            type(column) is np.ndarray and column.dtype is dtype and column.shape == shape and column.flags.aligned
            for column, dtype, shape in zip(columns, self.dtypes, self.shapes(lengths), strict=True)
        )

    def shapes(self, lengths: AxisSizes) -> tuple[tuple[int], ...]:
        """Return the shape of each column, where all have one axis."""
        by_axis = [(size,) for size in lengths.items()]
        return tuple(map(by_axis.__getitem__, self.axes))

    def frames(self, lengths: AxisSizes, frames: Sequence[memoryview]) -> dict[str, Array]:
        """Return the columns from the frames of a message (`framing`), without copying where they are aligned.

        Raises:
            InvalidRecord: there are too few or too many frames, or one has another size than its columns.
        """
        framing = self.framing(lengths)
        sizes = tuple([frame.nbytes for frame in frames])
        if sizes != framing.frames:
            raise InvalidRecord(f"columns: expected frames of {framing.frames} bytes for {lengths}, got {sizes}")
        read_only = [frame.toreadonly() for frame in frames]
        columns: list[Array] = []
        for number, (index, first, last) in framing.places:
            column = np.frombuffer(read_only[number], DTYPES[index], last - first, first * _ITEM_BYTES[index])
            columns.append(column if column.flags.aligned else _aligned(column))
        return self._shape(columns, lengths.widths)


def _aligned(column: Array) -> Array:
    copy = column.copy()
    copy.flags.writeable = False
    return copy


class Columned(Protocol):
    """A record, as its schema uses it: it has an attribute for each of the rules, these among them."""

    @property
    def tokens(self) -> Array:
        """Return [N] the tokens."""
        ...

    @property
    def rewards(self) -> Array:
        """Return [S] the rewards."""
        ...

    @property
    def reward_parts(self) -> Mapping[str, Array]:
        """Return the columns whose names are not fixed, by name."""
        ...


_Getter: TypeAlias = Callable[[Columned], tuple[Any, ...]]

_ARRAYS = {np.ndarray}


class _LayoutCache:
    """The properties of a record that could be copied unchanged. Most records differ from it only in their lengths."""

    __slots__ = ("_absent", "_form", "_names", "_own", "_parts", "_shapes", "_values")

    def __init__(self, form: ColumnLayout, parts: Sequence[str], absent: Sequence[str]) -> None:
        """Describe a record of this form, whose last columns are reward `parts`; the fields `absent` are None."""
        self._form = form
        self._own = len(form.names) - len(parts)
        self._values: _Getter = attrgetter(*form.names[: self._own], *absent)
        self._absent = (None,) * len(absent)
        self._parts = tuple(parts)
        self._names = frozenset(parts)
        self._shapes = itemgetter(*form.axes)
        """Takes the shape of each column from those over tokens, over sequences, and of offsets."""

    def match(self, record: Columned) -> tuple[ColumnLayout, AxisSizes, Sequence[Array]] | None:
        """Return the result of `Schema.laid_out` if `record` is alike, else None."""
        values, parts = self._values(record), record.reward_parts
        columns = values[: self._own]
        if parts:
            columns += tuple(map(parts.get, self._parts))
        if (
            parts.keys() != self._names
            or {*map(type, columns)} != _ARRAYS
            or not all(map(is_, values[self._own :], self._absent))
            or not all(map(is_, map(_dtype, columns), self._form.dtypes))
        ):
            return None
        tokens, sequences = record.tokens.size, record.rewards.size
        if not sequences or (self._form.versions_by_token and tokens == sequences):  # they count as by sequence
            return None
        if tuple(map(_shape, columns)) != self._shapes(((tokens,), (sequences,), (sequences + 1,))):
            return None
        return self._form, AxisSizes(tokens, sequences), columns


class Schema:
    """The columns that a kind of record may have, and a cache of its forms."""

    def __init__(self, kind: str, rules: Mapping[str, ColumnRule], *, part_prefix: str, part_rule: str) -> None:
        self.kind = kind
        self.rules = rules
        self._part_prefix = part_prefix
        self._part_rule = rules[part_rule]
        self._required = frozenset(name for name, rule in rules.items() if rule.required)
        self._either = tuple(name for name, rule in rules.items() if rule.axes == ("S", "N"))
        """Columns with a value a sequence or a value a token."""
        self._wide = tuple(name for name, rule in rules.items() if rule.wide is not None)
        """Columns of several dtypes."""
        self._values = attrgetter(*rules)
        """The values of all fields of a record that are columns, None included, in one step."""
        self._dtypes = tuple(rule.dtypes for rule in rules.values())
        self._sent: dict[tuple[object, ...], ColumnLayout] = {}
        self._recent: _LayoutCache | None = None
        """The properties of the last record that differed from the one before it: most records are alike."""
        self._received: dict[bytes, ColumnLayout] = {}

    def __repr__(self) -> str:
        return f"<Schema {self.kind}: {len(self.rules)} columns, {len(self._sent)} and {len(self._received)} forms>"

    # -- sending -----------------------------------------------------------------------------------------------------

    def columns(self, record: Columned) -> dict[str, Array]:
        """Return the arrays that are present in a record, by name; reward parts with their prefix, sorted.

        Unsorted, the same parts added in another order would be another form, and could not join a batch of this one.
        """
        present = {
            name: column for name, column in zip(self.rules, self._values(record), strict=True) if column is not None
        }
        if record.reward_parts:
            present |= {self._part_prefix + name: column for name, column in sorted(record.reward_parts.items())}
        return present

    def fields(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `columns` as the fields of a record: reward parts, without their prefix, in one."""
        if columns.keys() <= self.rules.keys():
            return columns
        parts = {n.removeprefix(self._part_prefix): column for n, column in columns.items() if n not in self.rules}
        return {name: column for name, column in columns.items() if name in self.rules} | {"reward_parts": parts}

    def laid_out(self, record: Columned) -> tuple[ColumnLayout, AxisSizes, Sequence[Array]]:
        """Return form and lengths of a record, and its columns ready to be copied: unchanged, or made `contiguous`.

        Raises:
            InvalidRecord: naming the first column that breaks its rule.
        """
        return (self._recent and self._recent.match(record)) or self._laid_out_anew(record)

    def _laid_out_anew(self, record: Columned) -> tuple[ColumnLayout, AxisSizes, Sequence[Array]]:
        columns = self.columns(record)
        form, lengths = self.measure(columns)
        if not form.contiguous(lengths, columns.values()):
            return form, lengths, self.contiguous(columns)
        absent = [name for name in self.rules if name not in columns]
        self._recent = _LayoutCache(form, sorted(record.reward_parts), absent)
        return form, lengths, tuple(columns.values())

    def measure(self, columns: Mapping[str, Array]) -> tuple[ColumnLayout, AxisSizes]:
        """Return form and lengths of a record that is to be sent, without checking every column.

        Raises:
            InvalidRecord: a required column is missing, or one is unknown, or there are no sequences.
        """
        try:
            sequences = len(columns["rewards"])
            check_sequences(sequences)
            dtypes = [columns[name].dtype for name in self._wide if name in columns]
            key = (*columns, *[len(columns[name]) == sequences for name in self._either], *dtypes)
            form = self._sent.get(key)
            if form is None:
                form = self._cache(self._sent, key, self._form_of(columns, sequences))
            widths = _widths_of(form, columns) if form.shaped else _NO_WIDTHS
            self._check_widths(form, widths)
            return form, AxisSizes(len(columns["tokens"]), sequences, widths)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            self.check(columns)
            raise

    def contiguous(self, columns: Mapping[str, Array]) -> list[Array]:
        """Return the columns as contiguous arrays of one axis and of the dtypes that travel; copied where need be.

        Raises:
            InvalidRecord: naming the first one that breaks its rule.
        """
        self.check(columns)
        return [contiguous(c, self.rule(name).dtype_of(c)).reshape(-1) for name, c in columns.items()]

    def check(self, columns: Mapping[str, Array], *, contents: bool = False) -> None:
        """Check every column against its rule: dtype and shape, and with `contents`, that floats are finite.

        Raises:
            InvalidRecord: naming the first one that breaks its rule, or there are no sequences.
        """
        rules = {**self.rules, **{name: self.rule(name) for name in columns}}
        if not contents:
            rules = {name: rule._replace(finite=False) for name, rule in rules.items()}
        offsets = next(name for name, rule in self.rules.items() if rule.axes == ("F",))
        lengths: dict[str, int] = {}
        check_axes(columns, {offsets: rules[offsets]}, lengths)
        if not lengths["F"]:
            raise InvalidRecord(f"{offsets}: expected at least the entry 0, got none")
        check_sequences(lengths["F"] - 1)
        check_axes(columns, rules, lengths | {"S": lengths["F"] - 1})

    def _form_of(self, columns: Mapping[str, Array], sequences: int) -> ColumnLayout:
        self._check_complete(columns)
        named = []
        for name, column in columns.items():
            rule = self.rule(name)
            over_sequences = len(rule.axes) == 1 or len(column) == sequences
            named.append((name, rule.dtype_of(column), rule.axes[0 if over_sequences else 1]))
        return ColumnLayout(named)

    def check_types(self, record: Columned) -> None:
        """Check that the columns of a record are arrays of the right dtypes. Cheap: checks no shape and no value.

        Raises:
            InvalidRecord: naming the first column that is none of these.
        """
        for column, dtypes in zip(self._values(record), self._dtypes, strict=True):
            if column is not None and (type(column) is not np.ndarray or column.dtype not in dtypes):
                self.check(self.columns(record))
                return
        if record.reward_parts and {*map(type, record.reward_parts.values())} != _ARRAYS:
            self.check(self.columns(record))

    # -- receiving ---------------------------------------------------------------------------------------------------

    def received(self, contents: BundleHeader) -> ColumnLayout:
        """Return the form that a peer names.

        Raises:
            InvalidRecord: it is a form of another kind of record, or breaks a rule, or there are too many candidates.
        """
        if contents.kind != self.kind:
            raise InvalidRecord(f"expected a {self.kind}, got a {contents.kind}")
        form = self._received.get(contents.form)
        if form is None:
            form = self._cache(self._received, contents.form, self._checked_form(contents.form))
        self._check_widths(form, contents.widths)
        return form

    def _checked_form(self, encoded: bytes) -> ColumnLayout:
        try:
            columns = _decode_form(encoded)
        except UNREADABLE as error:
            raise InvalidRecord(f"form: expected (name, dtype, axes) a column, got {error}") from None
        names = [name for name, _, _ in columns]
        if len(set(names)) != len(names):
            raise InvalidRecord(f"form: expected every column once, got {names}")
        self._check_complete(names)
        for name, code, axes in columns:
            rule = self.rule(name)
            codes = [dtype.str for dtype in rule.dtypes]
            if code not in codes or axes not in rule.axes:
                expected = f"{' or '.join(codes)} over {' or '.join(rule.axes)}"
                raise InvalidRecord(f"{name}: expected {expected}, got {code} over {axes}")
        return ColumnLayout([(name, np.dtype(code), axes) for name, code, axes in columns])

    # -- either ------------------------------------------------------------------------------------------------------

    def rule(self, name: str) -> ColumnRule:
        """Return the rule of column `name`.

        Raises:
            InvalidRecord: there is no such column.
        """
        rule = self._part_rule if name.startswith(self._part_prefix) else self.rules.get(name)
        if rule is None:
            raise InvalidRecord(f"{name}: expected one of the columns {sorted(self.rules)}")
        return rule

    @staticmethod
    def _check_widths(form: ColumnLayout, widths: Widths) -> None:
        if widths == _NO_WIDTHS:
            return
        axes = form.shaped.values()
        taught, routed, cut = "NK" in axes, "NLE" in axes, "NW" in axes
        most = Widths(MOST_CANDIDATES * taught, MOST_LAYERS * routed, MOST_EXPERTS * routed, MOST_CANDIDATES * cut)
        for name, bound, width in zip(Widths._fields, most, widths, strict=True):
            if width > bound:
                raise InvalidRecord(f"{name}: expected at most {bound} a token in {form.names}, got {width}")

    def _check_complete(self, names: Mapping[str, Any] | Sequence[str]) -> None:
        for name in self.rules:
            if name in self._required and name not in names:
                raise InvalidRecord(f"{name}: expected a column of {self.rules[name].dtype}, got none")

    @staticmethod
    def _cache(forms: dict[Any, ColumnLayout], key: object, form: ColumnLayout) -> ColumnLayout:
        if len(forms) >= CACHED_FORMS:
            forms.clear()
        if len(form.names) <= CACHED_COLUMNS:
            forms[key] = form
        return form


_NO_WIDTHS = Widths()


def _widths_of(form: ColumnLayout, columns: Mapping[str, Array]) -> Widths:
    """Return the lengths of the axes behind that over tokens; the first column with an axis decides."""
    candidates = layers = experts = support = 0
    for name, axes in reversed(form.shaped.items()):
        if axes == "NK":
            _, candidates = columns[name].shape
        elif axes == "NW":
            _, support = columns[name].shape
        else:
            _, layers, experts = columns[name].shape
    return Widths(candidates, layers, experts, support)


def check_offsets(name: str, offsets: list[int], tokens: int) -> None:
    """Raise `InvalidRecord` for offsets of a record that do not run from 0 to its tokens, or decrease."""
    if offsets[0] or offsets[-1] != tokens or offsets != sorted(offsets):
        raise InvalidRecord(
            f"{name}: expected to run from 0 to {tokens} (the number of tokens) without decrease, got {offsets}"
        )


def check_rollout_ids(rollouts: NDArray[np.int64]) -> None:
    """Raise `InvalidRecord` for rollout ids beyond those that the ledger counts."""
    if rollouts.view(np.uint64).max(initial=0) > MAX_REPETITION_ID:  # or less than 0
        raise InvalidRecord(f"rollout_ids: expected 0 to {MAX_REPETITION_ID}, got {rollouts.min()} to {rollouts.max()}")


def check_sequences(sequences: int) -> None:
    """Raise `InvalidRecord` for a record of no sequences."""
    if sequences < 1:
        raise InvalidRecord(
            f"rewards: expected at least one sequence, got {sequences}: a group without any has nothing to count or to "
            f"train, so do not send it"
        )
