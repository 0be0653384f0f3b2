"""`TrainBatch`: the input of an optimizer step. Groups packed end to end, never padded, with the ids to commit.

Axes: B sequences, N tokens, G groups, K teacher candidates, L layers with experts, E of which each chooses, W tokens
that a token was drawn from. `Packer` copies each group once, straight into the batch's own memory, so that the slot a
group came from is free again as soon as `add` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from .bounds import Count, Line
from .buffer_pool import Buffer, BufferPool
from .columns import Array, ColumnRule, count_between, freeze, run_ends
from .errors import UNREADABLE, InvalidRecord
from .group import GROUP_RULES, GROUP_SCHEMA, PART_PREFIX, TOKEN_COLUMNS, JsonObject, TrajectoryGroup
from .ids import GroupId, TrajectoryId
from .layout import AxisSizes, ColumnLayout, Length, Schema, Widths
from .numbers import whole_number

BATCH_RULES: dict[str, ColumnRule] = {
    "cu_seqlens": ColumnRule(np.dtype(np.int64), ("F",), required=True),
} | {name: rule for name, rule in GROUP_RULES.items() if name != "offsets"}

BATCH_SCHEMA = Schema("batch", BATCH_RULES, part_prefix=PART_PREFIX, part_rule="rewards")


class PackedGroup(NamedTuple):
    """The sequences of a batch that came from one group."""

    env: Line
    instance_id: Line
    sequences: Length
    meta: JsonObject
    loss_tokens: Length
    """Tokens of the whole group that train: the divisor of a mean over prompts, on a rank or a micro-batch too."""

    @property
    def id(self) -> GroupId:
        """Return the prompt that the sequences answer."""
        return GroupId(self.env, self.instance_id)


MOST_GROUPS = 2**20
"""Groups in a batch: more than any optimizer step trains."""

PackedGroups: TypeAlias = Annotated[tuple[PackedGroup, ...], msgspec.Meta(max_length=MOST_GROUPS)]


class PaddedBatch(NamedTuple):
    """A batch as rectangles [B, L], right-padded, for models that want no packing."""

    columns: dict[str, Array]
    """Every token column of the batch as [B, L], and further axes that it has behind them."""
    attention_mask: NDArray[np.bool_]
    """[B, L] true on real tokens."""


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Groups packed for one optimizer step (or for one rank's share of it)."""

    schema: ClassVar[Schema] = BATCH_SCHEMA

    groups: tuple[PackedGroup, ...]
    """The groups, in order; their sequences lie one after another."""
    tokens: NDArray[np.int32]
    """[N] token ids, sequence after sequence."""
    cu_seqlens: NDArray[np.int64]
    """[B + 1] the first token of each sequence; the last entry is N."""
    loss_mask: NDArray[np.bool_]
    """[N] true on the tokens the policy sampled and that train."""
    rewards: NDArray[np.float32]
    """[B]."""
    policy_versions: NDArray[np.int64]
    """[B], or [N] where weights changed mid-rollout in any of the groups."""
    stop_reasons: NDArray[np.uint8]
    """[B] values of StopReason."""
    rollout_ids: NDArray[np.int64]
    """[B] the rollout of each sequence: its number among those of the prompt."""
    loss_tokens: int
    """Tokens that train in the *global* batch: the divisor of a token-mean loss, on a rank or a micro-batch too."""
    loss_rollouts: int
    """Rollouts with at least one such token in the *global* batch: the divisor of a mean over rollouts."""
    loss_groups: int
    """Groups with at least one such token in the *global* batch."""
    total_rollouts: int
    """Rollouts of the *global* batch whether or not they train, those of groups without a token that trains included:
    the other divisor that a mean over rollouts may have."""
    reward_noise: NDArray[np.float32] | None = None
    """[B] how far rounding may have moved each reward."""
    behavior_logprobs: NDArray[np.float32] | None = None
    """[N] log-probability under the sampling policy."""
    token_rewards: NDArray[np.float32] | None = None
    """[N]."""
    values: NDArray[np.float32] | None = None
    """[N] the return that a critic expected before each token was sampled."""
    advantages: NDArray[np.float32] | None = None
    """[N]."""
    ref_logprobs: NDArray[np.float32] | None = None
    """[N] log-probability under the reference policy."""
    teacher_ids: NDArray[np.int32] | None = None
    """[N, K], −1 where a row has fewer than K."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[N, K]."""
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """[N, L, E] the experts that the sampling engine chose in each layer; zeros where it recorded none."""
    support_ids: NDArray[np.int32] | None = None
    """[N, W] the tokens that each could be drawn from, −1 where there are fewer; −1 alone for the whole vocabulary."""
    reward_parts: dict[str, NDArray[np.float32]] = {}
    """[B] each."""

    @classmethod
    def pack(cls, groups: Iterable[TrajectoryGroup]) -> TrainBatch:
        """Return one batch with copies of `groups`.

        Raises:
            InvalidRecord: there are no groups, or they do not have the same columns.
        """
        listed = list(groups)
        packer = Packer(max_tokens=sum(len(group.tokens) for group in listed))
        for group in listed:
            packer.add(group)
        return packer.pack()

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.cu_seqlens) - 1

    def __repr__(self) -> str:
        return f"<TrainBatch: {len(self.groups)} groups, {len(self)} sequences, {len(self.tokens)} tokens>"

    @property
    def ids(self) -> list[TrajectoryId]:
        """Return the id of the rollout of each sequence; the batch will commit them."""
        names = [group.id for group in self.groups for _ in range(group.sequences)]
        return [TrajectoryId(*name, rep) for name, rep in zip(names, self.rollout_ids.tolist(), strict=True)]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the columns."""
        return sum(column.nbytes for column in self.columns().values())

    @property
    def position_ids(self) -> NDArray[np.int64]:
        """Return [N] the position of each token within its sequence; computed with every call."""
        return np.arange(len(self.tokens)) - np.repeat(self.cu_seqlens[:-1], self.lengths())

    def lengths(self) -> NDArray[np.int64]:
        """Return [B] the number of tokens of each sequence."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    def completion_lengths(self) -> NDArray[np.int64]:
        """Return [B] the number of tokens of each sequence that train."""
        return count_between(self.loss_mask, self.cu_seqlens)

    def sequence_of_token(self) -> NDArray[np.int64]:
        """Return [N] the sequence of each token."""
        return np.repeat(np.arange(len(self)), self.lengths())

    def group_of_sequence(self) -> NDArray[np.int64]:
        """Return [B] the group of each sequence."""
        return np.repeat(np.arange(len(self.groups)), [group.sequences for group in self.groups])

    @property
    def rollouts(self) -> int:
        """Return the number of rollouts."""
        return len(self.rollout_starts())

    def rollout_starts(self) -> NDArray[np.int64]:
        """Return the first sequence of each rollout."""
        return _rollout_starts(self.rollout_ids, self.groups)

    def rollout_ends(self) -> NDArray[np.int64]:
        """Return the last sequence of each rollout."""
        return run_ends(self.rollout_starts(), len(self))

    def lags(self, current_version: int) -> NDArray[np.int64]:
        """Return [B] the optimizer steps between the oldest weights that sampled a sequence and `current_version`."""
        return current_version - oldest_versions(self.policy_versions, self.cu_seqlens)

    def _over_tokens(self, name: str) -> bool:
        """Return whether a column has an entry a token. Where B = N, `policy_versions` counts as one a sequence."""
        return name in TOKEN_COLUMNS or (name == "policy_versions" and len(self.policy_versions) != len(self))

    def _taken(self, rows: Any, tokens: Any) -> dict[str, Array]:
        """Return the parts that `rows` selects of columns over sequences, and `tokens` of columns over tokens."""
        taken = {
            name: column[tokens if self._over_tokens(name) else rows]
            for name, column in self.columns().items()
            if name != "cu_seqlens"
        }
        freeze(taken.values())
        return taken

    def select(self, keep: NDArray[np.bool_]) -> TrainBatch:
        """Return a batch of the groups where `keep` [G] is true, with the totals of those.

        Raises:
            InvalidRecord: `keep` is false everywhere.
        """
        if not keep.any():
            raise InvalidRecord("select: expected to keep at least one group, got none")
        kept = self._only(keep[self.group_of_sequence()])
        return msgspec.structs.replace(kept, total_rollouts=self.total_rollouts - self.rollouts + kept.rollouts)

    def in_order(self) -> TrainBatch:
        """Return the batch with its groups in the order of their ids."""
        ids = [group.id for group in self.groups]
        order = sorted(range(len(ids)), key=ids.__getitem__)
        if order == list(range(len(ids))):
            return self
        places = np.argsort(order)[self.group_of_sequence()]
        rows = np.argsort(places, kind="stable")
        tokens = np.argsort(places[self.sequence_of_token()], kind="stable")
        taken = self._taken(rows, tokens)
        groups = tuple(self.groups[place] for place in order)
        return self._with_totals(_finish(groups, taken, _bounds(self.lengths()[rows])))

    def share(self, rows: NDArray[np.bool_]) -> TrainBatch:
        """Return a rank's share: the sequences where `rows` [B] is true, if any, and the totals of the whole."""
        return self._with_totals(self._only(rows))

    def _with_totals(self, part: TrainBatch) -> TrainBatch:
        """Return `part` of this batch with the totals of the whole batch."""
        return msgspec.structs.replace(
            part,
            loss_tokens=self.loss_tokens,
            loss_rollouts=self.loss_rollouts,
            loss_groups=self.loss_groups,
            total_rollouts=self.total_rollouts,
        )

    def _only(self, rows: NDArray[np.bool_]) -> TrainBatch:
        taken = self._taken(rows, np.repeat(rows, self.lengths()))
        return self._part(self.group_of_sequence()[rows], taken, _bounds(self.lengths()[rows]))

    def _part(self, owners: NDArray[np.int64], taken: dict[str, Array], bounds: NDArray[np.int64]) -> TrainBatch:
        """Return a batch of `taken` columns with `bounds`, of sequences whose groups are `owners`."""
        counts = np.bincount(owners, minlength=len(self.groups))
        groups = tuple(g._replace(sequences=n) for g, n in zip(self.groups, counts.tolist(), strict=True) if n)
        return _finish(groups, taken, bounds)

    def split(self, max_tokens: int) -> list[TrainBatch]:
        """Return micro-batches of at most `max_tokens` tokens (a longer sequence is alone), split between sequences.

        Every part keeps the global totals, so that losses of the parts add up to the loss of the whole.
        """
        parts: list[TrainBatch] = []
        max_tokens = whole_number("max_tokens", max_tokens)
        first, bounds = 0, self.cu_seqlens.tolist()
        for last in range(1, len(self) + 1):
            if last == len(self) or bounds[last + 1] - bounds[first] > max_tokens:
                parts.append(self._slice(first, last))
                first = last
        return parts

    def _slice(self, first: int, last: int) -> TrainBatch:
        a, b = int(self.cu_seqlens[first]), int(self.cu_seqlens[last])
        taken = self._taken(slice(first, last), slice(a, b))
        owners = self.group_of_sequence()[first:last]
        return self._with_totals(self._part(owners, taken, self.cu_seqlens[first : last + 1] - a))

    def padded(self, *, pad_token: int = 0, length: int | None = None) -> PaddedBatch:
        """Return the token columns as right-padded [B, L] rectangles: tokens with `pad_token`, others with 0 or false.

        `length` fixes L; by default it is the longest sequence.

        Raises:
            InvalidRecord: a sequence is longer than `length`.
        """
        lengths = self.lengths()
        longest = int(lengths.max(initial=0))
        width = longest if length is None else whole_number("length", length, least=0)
        if longest > width:
            raise InvalidRecord(f"padded: expected sequences of at most {width} tokens, got one of {longest}")
        mask = np.arange(width) < lengths[:, None]
        padded: dict[str, Array] = {}
        for name in (*TOKEN_COLUMNS, "position_ids"):
            column = getattr(self, name)
            if column is not None:
                fill = pad_token if name == "tokens" else -1 if name in {"teacher_ids", "support_ids"} else 0
                padded[name] = np.full((*mask.shape, *column.shape[1:]), fill, column.dtype)
                padded[name][mask] = column
        return PaddedBatch(padded, mask)

    # -- encoding ----------------------------------------------------------------------------------------------------

    def columns(self) -> dict[str, Array]:
        """Return the arrays that are present, by name; reward parts as `reward_parts.<name>`."""
        return self.schema.columns(self)

    def header(self) -> bytes:
        """Return the fields that are not columns, as msgpack."""
        totals = (self.loss_tokens, self.loss_rollouts, self.loss_groups, self.total_rollouts)
        return _encode_header((self.groups, *totals))

    @classmethod
    def assemble(cls, header: bytes | memoryview, columns: Mapping[str, Array]) -> Self:
        """Return the batch of `header` and `columns`. The columns are trusted, because `BATCH_SCHEMA` has checked them.

        Raises:
            InvalidRecord: the header is malformed, or counts other sequences than `columns` have.
        """
        try:
            groups, loss_tokens, loss_rollouts, loss_groups, total_rollouts = _decode_header(header)
        except UNREADABLE as error:
            raise InvalidRecord(
                f"header: expected (groups, loss_tokens, loss_rollouts, loss_groups, total_rollouts), got {error}"
            ) from None
        sequences = sum(group.sequences for group in groups)
        if sequences != len(columns["rewards"]):
            raise InvalidRecord(f"header: expected groups of {len(columns['rewards'])} sequences, got {sequences}")
        return cls(
            groups=groups,
            loss_tokens=loss_tokens,
            loss_rollouts=loss_rollouts,
            loss_groups=loss_groups,
            total_rollouts=total_rollouts,
            **cls.schema.fields(columns),
        )


_encode_header = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(tuple[PackedGroups, Count, Count, Count, Count]).decode


class Packer:
    """Copies groups one after the other into preallocated columns, and makes batches of them.

    The first group of a batch fixes its optional columns. Not thread-safe.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens: int = whole_number("max_tokens", max_tokens, least=0)
        """Tokens that one batch holds at most."""
        self._plan = _Plan.of(ColumnLayout([]), Widths(), 0)
        """The places of the columns of the batch; while it is empty, those of the batch before it."""
        self._memory = BufferPool()
        self._block: Buffer | None = None
        """The memory of the columns over tokens; None while the batch is empty."""
        self._chunks: list[list[bytes]] = []
        """For each column over sequences, the part of every group. They are small, and joined in `pack`."""
        self._starts: list[int] = []
        """Tokens before each group."""
        self._by_token: list[bool] = []
        """True if each group has a policy version a token."""
        self._groups: list[PackedGroup] = []
        self._rollouts = 0
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Return the tokens packed so far."""
        return self._tokens

    @property
    def groups(self) -> int:
        """Return the groups packed so far."""
        return len(self._groups)

    @property
    def rollouts(self) -> int:
        """Return the rollouts packed so far."""
        return self._rollouts

    def fits(self, group: TrajectoryGroup) -> bool:
        """Return whether `group` has room in the batch that is being filled."""
        return self._tokens + len(group.tokens) <= self.max_tokens

    def add(self, group: TrajectoryGroup) -> None:
        """Copy `group` in.

        Raises:
            InvalidRecord: it does not fit, or its columns differ from those of the groups before it.
        """
        form, lengths, columns = GROUP_SCHEMA.laid_out(group)
        if not self.fits(group) or (self._block is not None and not self._plan.suits(form, lengths.widths)):
            raise self._refusal(group, form, lengths)
        views = (self._block or self._open(form, lengths.widths)).typed
        first = self._tokens
        last = first + lengths.tokens
        for target, chunks, column in zip(self._plan.targets, self._chunks, columns, strict=True):
            # There are three cases:
            #
            # 1. The column is over sequences: it is small, and its length in the batch is not known before `pack`, so
            #    its bytes are kept.
            # 2. It is over tokens: it is copied to its place in the batch, once.
            # 3. As 2, but it begins at an odd address, and the assignment raises ValueError: this is too rare to check
            #    for, so it is found by trying, and the column is copied twice.
            if target is None:
                chunks.append(column.tobytes())
            else:
                index, begin, width = target
                place = slice(begin + first * width, begin + last * width)
                try:
                    views[index][place] = column
                except ValueError:
                    views[index][place] = column.copy()
        trained = int(np.count_nonzero(group.loss_mask))
        self._groups.append(PackedGroup(group.env, group.instance_id, lengths.sequences, group.meta, trained))
        self._starts.append(first)
        self._by_token.append(form.versions_by_token)
        self._rollouts += group.rollouts
        self._tokens = last

    def pack(self) -> TrainBatch:
        """Return the batch that was filled, and empty the packer.

        Raises:
            InvalidRecord: no group was added.
        """
        if self._block is None:
            raise InvalidRecord("pack: expected at least one group, got none")
        columns = self._plan.columns(self._block.array, self._tokens, self._chunks)
        counts = [group.sequences for group in self._groups]
        bounds = _join_offsets(columns.pop("offsets"), self._starts, counts)
        if True in self._by_token:
            columns["policy_versions"] = _by_token_or_sequence(
                columns["policy_versions"], self._by_token, self._starts, counts, bounds
            )
            freeze((columns["policy_versions"],))
        batch = _finish(tuple(self._groups), columns, bounds)
        self._block = None
        self._chunks, self._groups, self._starts, self._by_token = [], [], [], []
        self._tokens = self._rollouts = 0
        return batch

    def _open(self, form: ColumnLayout, widths: Widths) -> Buffer:
        if not self._plan.suits(form, widths):
            self._plan = _Plan.of(form, widths, self.max_tokens)
        try:
            self._block = self._memory.block(self._plan.nbytes)
        except MemoryError:
            if not widths.candidates:
                raise
            raise InvalidRecord(
                f"expected memory for a batch of {self.max_tokens} tokens, got none for {self._plan.nbytes} bytes: "
                f"make batches smaller, or send fewer teacher candidates than {widths.candidates} a token"
            ) from None
        self._chunks = [[] for _ in form.names]
        return self._block

    def _refusal(self, group: TrajectoryGroup, form: ColumnLayout, lengths: AxisSizes) -> InvalidRecord:
        if not self.fits(group):
            return InvalidRecord(
                f"tokens: expected at most {self.max_tokens - self._tokens} more (of {self.max_tokens}), "
                f"got a group of {len(group.tokens)}"
            )
        expected, got = set(self._plan.form.names), set(form.names)
        if expected != got:
            return InvalidRecord(
                f"{group.env}/{group.instance_id}: expected the columns of the groups before it, "
                f"missing {sorted(expected - got)}, extra {sorted(got - expected)}"
            )
        return InvalidRecord(
            f"{group.env}/{group.instance_id}: expected {self._plan.described} a token, as in the groups before it, "
            f"got {_Plan(form, lengths.widths, 0, []).described}"
        )


class _Plan(NamedTuple):
    """The places of the columns over tokens of a batch in its memory."""

    form: ColumnLayout
    widths: Widths
    nbytes: int
    targets: list[tuple[int, int, int] | None]
    """For each column over tokens: its dtype, as an index into DTYPES, its first item, and items a token."""

    @classmethod
    def of(cls, form: ColumnLayout, widths: Widths, max_tokens: int) -> _Plan:
        layout = form.layout(AxisSizes(max_tokens, 0, widths))
        targets = [
            (index, first, widths.items_of(form.shaped.get(name))) if name in TOKEN_COLUMNS else None
            for name, (index, first, _) in zip(form.names, layout.places, strict=True)
        ]
        return cls(form, widths, layout.nbytes, targets)

    def suits(self, form: ColumnLayout, widths: Widths) -> bool:
        """Return whether it is a plan for columns of that form."""
        same = form is self.form or (form.names == self.form.names and form.dtypes == self.form.dtypes)
        return same and widths == self.widths

    @property
    def described(self) -> str:
        """Return what each token has in the columns of more than one axis."""
        dtypes = dict(zip(self.form.names, self.form.dtypes, strict=True))
        candidates, layers, experts, support = self.widths
        taught = f"{candidates} teacher candidates" if "teacher_ids" in dtypes else ""
        routed = (
            f"{experts} experts of {layers} layers ({dtypes['routed_experts']})" if "routed_experts" in dtypes else ""
        )
        cut = f"a support of {support}" if "support_ids" in dtypes else ""
        return " and ".join(filter(None, (taught, routed, cut)))

    def columns(self, memory: NDArray[np.uint8], tokens: int, chunks: list[list[bytes]]) -> dict[str, Array]:
        """Return all columns: those over tokens, `tokens` long, as views on `memory`, the others joined."""
        columns: dict[str, Array] = {}
        for name, dtype, target, kept in zip(self.form.names, self.form.dtypes, self.targets, chunks, strict=True):
            if target is None:
                columns[name] = np.frombuffer(b"".join(kept), dtype)
            else:
                _, first, width = target
                columns[name] = np.frombuffer(memory, dtype, tokens * width, first * dtype.itemsize)
        for name, axes in self.form.shaped.items():
            columns[name] = columns[name].reshape(tokens, *self.widths.shape_of(axes))
        return columns


_ZERO = np.zeros(1, np.int64)


def oldest_versions(versions: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [S] the oldest policy version of each sequence, from a column over sequences or over tokens.

    A sequence without tokens counts as version 0 where versions are kept by token.
    """
    count = len(offsets) - 1
    if len(versions) == count:
        return versions
    oldest = np.zeros(count, np.int64)
    filled = np.diff(offsets) > 0
    if filled.any():
        oldest[filled] = np.minimum.reduceat(versions, offsets[:-1][filled])
    return oldest


def _join_offsets(joined: NDArray[np.int64], starts: Sequence[int], counts: Sequence[int]) -> NDArray[np.int64]:
    """Return [B + 1] the first token of each sequence of a batch, from its groups' offsets, each from 0 on."""
    bounds = np.zeros(len(joined) - len(counts) + 1, np.int64)
    if len(set(counts)) == 1:
        by_group = joined.reshape(len(counts), -1)[:, 1:]
        np.add(by_group, np.array(starts)[:, None], out=bounds[1:].reshape(by_group.shape))
        return bounds
    first = 0
    for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
        np.add(joined[first + number + 1 :][:count], start, out=bounds[first + 1 :][:count])
        first += count
    return bounds


def _by_token_or_sequence(
    versions: NDArray[np.int64],
    by_token: Sequence[bool],
    starts: Sequence[int],
    counts: Sequence[int],
    bounds: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return one version a token, from groups with one a token and groups with one a sequence.

    Where there happen to be as many tokens as sequences (some are empty), a column over tokens could be taken for one
    over sequences, so only the oldest version of each sequence is kept.
    """
    tokens = [b - a for a, b in pairwise([*starts, int(bounds[-1])])]
    sizes = [n if spread else count for spread, n, count in zip(by_token, tokens, counts, strict=True)]
    groups = np.split(versions, list(accumulate(sizes))[:-1])
    offsets = [
        bounds[a : b + 1] - start for (a, b), start in zip(pairwise([0, *accumulate(counts)]), starts, strict=True)
    ]
    if int(bounds[-1]) == len(bounds) - 1:
        return np.concatenate([oldest_versions(v, o) for v, o in zip(groups, offsets, strict=True)])
    spread_out = [
        v if spread else np.repeat(v, np.diff(o)) for v, o, spread in zip(groups, offsets, by_token, strict=True)
    ]
    return np.concatenate(spread_out)


def _bounds(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [B + 1] the first token of sequences of `lengths` [B]."""
    return np.concatenate([_ZERO, np.cumsum(lengths)])


def _rollout_starts(rollout_ids: NDArray[np.int64], groups: Sequence[PackedGroup]) -> NDArray[np.int64]:
    """Return the first sequence of each rollout, of ids [B] in `groups`."""
    begun = np.ones(len(rollout_ids), np.bool_)
    begun[1:] = rollout_ids[1:] != rollout_ids[:-1]
    ends = np.array([group.sequences for group in groups], np.int64).cumsum()
    begun[ends[ends < len(begun)]] = True
    return np.flatnonzero(begun)


def _finish(groups: tuple[PackedGroup, ...], columns: dict[str, Array], cu_seqlens: NDArray[np.int64]) -> TrainBatch:
    """Return a batch of its columns, read-only ones, and its bounds, with the totals that follow from them."""
    columns["cu_seqlens"] = cu_seqlens
    freeze((cu_seqlens,))
    mask, firsts = columns["loss_mask"], _rollout_starts(columns["rollout_ids"], groups)
    starts, ends = cu_seqlens[firsts], cu_seqlens[run_ends(firsts, len(cu_seqlens) - 1) + 1]
    filled = starts[ends > starts]
    return TrainBatch(
        groups=groups,
        loss_tokens=int(np.count_nonzero(mask)),
        loss_rollouts=int(np.count_nonzero(np.logical_or.reduceat(mask, filled))) if len(filled) else 0,
        loss_groups=sum(group.loss_tokens > 0 for group in groups),
        total_rollouts=len(firsts),
        **BATCH_SCHEMA.fields(columns),
    )
