"""`TrajectoryGroup`: the unit that travels. All completions of one prompt, as numpy columns.

Axes, used in every docstring below: S sequences, R rollouts, N tokens in all, K teacher candidates a token, L layers
with experts, E of which each chooses for a token, W tokens that a token was drawn from. Sequence s owns
`tokens[offsets[s]:offsets[s + 1]]`: its prompt first, then the rest, with `loss_mask` true on the tokens that the
policy sampled and that train. A rollout is one completion of the prompt. It has several sequences, its *branches*, if
the history before some of its tokens is no continuation of the history before others.

`TrajectoryGroup.build` checks everything, once, where data enters; the plain constructor trusts its caller and is for
code that already holds checked columns. A group is immutable: `with_…` methods return a new one that shares columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from .bounds import LONGEST_LINE, Line
from .columns import Array, ColumnRule, as_column, check_axes, count_between, count_runs, freeze, run_ends, run_starts
from .errors import UNREADABLE, InvalidRecord
from .ids import GroupId, StopReason, TrajectoryId
from .layout import Schema, check_offsets, check_rollout_ids
from .noise import check_distinct, noise_of_sum, rounding

JsonObject: TypeAlias = dict[str, Any]

PART_PREFIX = "reward_parts."

GROUP_RULES: dict[str, ColumnRule] = {
    "offsets": ColumnRule(np.dtype(np.int64), ("F",), required=True),
    "tokens": ColumnRule(np.dtype(np.int32), ("N",), required=True),
    "loss_mask": ColumnRule(np.dtype(np.bool_), ("N",), required=True),
    "rewards": ColumnRule(np.dtype(np.float32), ("S",), required=True, finite=True),
    "policy_versions": ColumnRule(np.dtype(np.int64), ("S", "N"), required=True),
    "stop_reasons": ColumnRule(np.dtype(np.uint8), ("S",), required=True),
    "rollout_ids": ColumnRule(np.dtype(np.int64), ("S",), required=True),
    "reward_noise": ColumnRule(np.dtype(np.float32), ("S",), finite=True),
    "behavior_logprobs": ColumnRule(np.dtype(np.float32), ("N",), finite=True),
    "token_rewards": ColumnRule(np.dtype(np.float32), ("N",), finite=True),
    "values": ColumnRule(np.dtype(np.float32), ("N",), finite=True),
    "advantages": ColumnRule(np.dtype(np.float32), ("N",), finite=True),
    "ref_logprobs": ColumnRule(np.dtype(np.float32), ("N",), finite=True),
    "teacher_ids": ColumnRule(np.dtype(np.int32), ("NK",)),
    "teacher_logprobs": ColumnRule(np.dtype(np.float32), ("NK",)),
    "routed_experts": ColumnRule(np.dtype(np.uint8), ("NLE",), wide=np.dtype(np.uint16)),
    "support_ids": ColumnRule(np.dtype(np.int32), ("NW",)),
}

GROUP_SCHEMA = Schema("group", GROUP_RULES, part_prefix=PART_PREFIX, part_rule="rewards")

TOKEN_COLUMNS = tuple(name for name, rule in GROUP_RULES.items() if all(axes[0] == "N" for axes in rule.axes))
"""Columns that always have an entry a token; `policy_versions` may have."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One sequence: row `s` of a group. Every array is a view into the group's columns; T is its length."""

    id: TrajectoryId
    """The rollout of the sequence."""
    tokens: NDArray[np.int32]
    """[T] prompt and completion token ids."""
    loss_mask: NDArray[np.bool_]
    """[T] true on the tokens the policy sampled and that train."""
    reward: float
    stop_reason: StopReason
    policy_versions: NDArray[np.int64]
    """[1] or [T] optimizer step of the weights that sampled."""
    behavior_logprobs: NDArray[np.float32] | None = None
    """[T] log-probability under the sampling policy."""
    token_rewards: NDArray[np.float32] | None = None
    """[T] where the environment scores tokens."""
    values: NDArray[np.float32] | None = None
    """[T] the return that a critic expected before each token."""
    advantages: NDArray[np.float32] | None = None
    """[T]."""
    ref_logprobs: NDArray[np.float32] | None = None
    """[T] log-probability under the reference policy."""
    teacher_ids: NDArray[np.int32] | None = None
    """[T, K] top-K token ids of the teacher, −1 where a row has fewer."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[T, K]."""
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """[T, L, E] the experts that the sampling engine chose; zeros where it recorded none."""
    support_ids: NDArray[np.int32] | None = None
    """[T, W] the tokens that each could be drawn from, −1 where there are fewer."""

    @property
    def prompt_length(self) -> int:
        """Return the number of tokens before the first one that the policy sampled."""
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else len(self.tokens)


class TrajectoryGroup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All completions of one prompt.

    >>> group = TrajectoryGroup.build(
    ...     env="chain_sum", instance_id="17", sequences=[[5, 6, 7], [5, 6, 8, 9]],
    ...     loss_mask=[[0, 0, 1], [0, 0, 1, 1]], rewards=[1.0, 0.0],
    ... )
    >>> group.completion_lengths().tolist()
    [1, 2]
    """

    schema: ClassVar[Schema] = GROUP_SCHEMA

    env: str
    """Name of the environment."""
    instance_id: str
    """Name of the prompt, never reused within a run."""
    tokens: NDArray[np.int32]
    """[N] prompt and completion token ids, sequence after sequence."""
    offsets: NDArray[np.int64]
    """[S + 1] the first token of each sequence; the last entry is N."""
    loss_mask: NDArray[np.bool_]
    """[N] true on the tokens the policy sampled and that train."""
    rewards: NDArray[np.float32]
    """[S] reward of each sequence."""
    policy_versions: NDArray[np.int64]
    """[S] optimizer step of the weights that sampled, or [N] where weights changed mid-rollout."""
    stop_reasons: NDArray[np.uint8]
    """[S] values of StopReason."""
    rollout_ids: NDArray[np.int64]
    """[S] the rollout of each sequence: its number among those of the prompt. The sequences of a rollout, its branches,
    lie one after another, and each token that was sampled trains in one of them."""
    reward_noise: NDArray[np.float32] | None = None
    """[S] how far rounding may have moved each reward; without it, as far as the rounding of the reward itself."""
    behavior_logprobs: NDArray[np.float32] | None = None
    """[N] log-probability under the sampling policy; 0 where loss_mask is false."""
    token_rewards: NDArray[np.float32] | None = None
    """[N] where the environment scores tokens."""
    values: NDArray[np.float32] | None = None
    """[N] the return that a critic expected before each token was sampled."""
    advantages: NDArray[np.float32] | None = None
    """[N] filled by AdvantageNormalizer, or by the environment."""
    ref_logprobs: NDArray[np.float32] | None = None
    """[N] log-probability under the reference policy."""
    teacher_ids: NDArray[np.int32] | None = None
    """[N, K] top-K token ids of the teacher; ragged rows are padded with −1."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[N, K]."""
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """[N, L, E] the experts that the sampling engine chose in each layer, uint8 for up to 256. Zeros where it recorded
    none, as for the last token of a sequence: E experts of one token differ, so that no record has equal ones."""
    support_ids: NDArray[np.int32] | None = None
    """[N, W] the tokens that each could be drawn from, −1 where there are fewer than W; −1 alone where none was drawn,
    or from the whole vocabulary. `behavior_logprobs` are those of the restricted distribution then."""
    reward_parts: dict[str, NDArray[np.float32]] = {}
    """[S] each: the contribution of every component of the reward bridge, and the raw score."""
    meta: JsonObject = {}
    """JSON-able: messages, overrides, generation parameters, images by reference."""

    @classmethod
    def build(
        cls,
        *,
        env: str,
        instance_id: str,
        sequences: Sequence[ArrayLike] | None = None,
        tokens: ArrayLike | None = None,
        offsets: ArrayLike | None = None,
        loss_mask: ArrayLike | Sequence[ArrayLike],
        rewards: ArrayLike,
        policy_versions: ArrayLike | None = None,
        stop_reasons: ArrayLike | None = None,
        rollout_ids: ArrayLike | None = None,
        reward_parts: Mapping[str, ArrayLike] | None = None,
        meta: Mapping[str, Any] | None = None,
        **optional: ArrayLike | Sequence[ArrayLike] | None,
    ) -> Self:
        """Return a checked group, from one list of `sequences` or from flat `tokens` with `offsets`.

        Columns over tokens may be given flat ([N]) or as one row a sequence. Lists are converted once, here; pass
        arrays where speed matters: they are used unchanged, and made read-only. `policy_versions` defaults to 0,
        `stop_reasons` to STOP, `rollout_ids` to 0…S−1: each sequence is a rollout of its own.

        Raises:
            InvalidRecord: a column has the wrong dtype, shape or contents, there are no sequences, the sequences of a
                rollout differ in reward, or the rewards of rollouts differ by less than float32 can hold.
            TypeError: an unknown column.
        """
        unknown = optional.keys() - GROUP_RULES.keys()
        if unknown:
            raise TypeError(f"unknown columns {sorted(unknown)}; a group has {sorted(GROUP_RULES)}")
        columns = {"loss_mask": loss_mask, "rewards": rewards, **optional}
        flat: dict[str, Any] = {name: _flat(name, values) for name, values in columns.items() if values is not None}
        if sequences is not None:
            flat["tokens"] = _flat("tokens", sequences)
            flat["offsets"] = np.cumsum([0, *(len(np.atleast_1d(np.asarray(s))) for s in sequences)])
        else:
            flat |= {"tokens": tokens, "offsets": offsets}
        count = len(np.atleast_1d(np.asarray(rewards)))
        flat["policy_versions"] = np.zeros(count, np.int64) if policy_versions is None else policy_versions
        flat["stop_reasons"] = np.zeros(count, np.uint8) if stop_reasons is None else stop_reasons
        flat["rollout_ids"] = np.arange(count) if rollout_ids is None else rollout_ids
        group = cls(
            env=env,
            instance_id=instance_id,
            reward_parts={k: as_column(PART_PREFIX + k, v, np.float32) for k, v in (reward_parts or {}).items()},
            meta=dict(meta or {}),
            **{name: as_column(name, values, GROUP_RULES[name].dtype_of(values)) for name, values in flat.items()},
        )
        try:
            group.validate()
            check_distinct(flat["rewards"])
        except InvalidRecord as error:
            raise InvalidRecord(f"{error} (in {env}/{instance_id})") from None
        freeze(group.columns().values())
        return group

    def validate(self) -> None:
        """Check every rule of the schema.

        Raises:
            InvalidRecord: naming the column, the expected value and the actual one.
        """
        self._check_header()
        self.schema.check(self.columns(), contents=True)
        check_offsets("offsets", self.offsets.tolist(), len(self.tokens))
        self._check_contents()

    def _check_header(self) -> None:
        for name in ("env", "instance_id"):
            value = getattr(self, name)
            if type(value) is not str:
                raise InvalidRecord(f"{name}: expected str, got {type(value).__name__} ({value!r})")
            if len(value) > LONGEST_LINE:
                raise InvalidRecord(f"{name}: expected at most {LONGEST_LINE} characters, got {len(value)}")
        check_meta(self.meta)

    def _check_contents(self) -> None:
        if len(self.stop_reasons) and self.stop_reasons.max() > max(StopReason):
            raise InvalidRecord(f"stop_reasons: expected 0 to {max(StopReason):d}, got {self.stop_reasons.max()}")
        check_rollout_ids(self.rollout_ids)
        check_branches(self)
        if len(self.tokens) and self.tokens.min() < 0:
            raise InvalidRecord(f"tokens: expected ids of 0 or more, got {self.tokens.min()}")
        starts = self.offsets[:-1][self.offsets[1:] > self.offsets[:-1]]
        if self.loss_mask[starts].any():
            where = int(np.flatnonzero(self.loss_mask[starts])[0])
            raise InvalidRecord(
                f"loss_mask: expected false on the first token of every sequence (nothing precedes it, so nothing "
                f"predicts it), got true at token {int(starts[where])}"
            )
        self._check_teacher()
        if self.support_ids is not None:
            check_support(self.tokens, self.loss_mask, self.support_ids)

    def _check_teacher(self) -> None:
        ids, logprobs = self.teacher_ids, self.teacher_logprobs
        if (ids is None) != (logprobs is None):
            raise InvalidRecord("teacher_ids, teacher_logprobs: expected both columns or neither, got one")
        if ids is not None and ids.size and ids.min() < -1:
            raise InvalidRecord(f"teacher_ids: expected ids of 0 or more, or −1 for none, got {ids.min()}")
        if logprobs is not None and np.isnan(logprobs).any():
            raise InvalidRecord(
                f"teacher_logprobs: expected no NaN, got one at {np.argwhere(np.isnan(logprobs))[0].tolist()}"
            )

    # -- size and identity -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.offsets) - 1

    @property
    def rollouts(self) -> int:
        """Return the number of rollouts, R."""
        return count_runs(self.rollout_ids)

    def rollout_starts(self) -> NDArray[np.int64]:
        """Return [R] the first sequence of each rollout."""
        return run_starts(self.rollout_ids)

    def rollout_ends(self) -> NDArray[np.int64]:
        """Return [R] the last sequence of each rollout."""
        return run_ends(self.rollout_starts(), len(self))

    def rollout_of_sequence(self) -> NDArray[np.int64]:
        """Return [S] the place of each sequence's rollout among those of the group."""
        starts = self.rollout_starts()
        return np.arange(len(starts)).repeat(np.diff(starts, append=len(self)))

    def __repr__(self) -> str:
        present = [name for name in GROUP_RULES if getattr(self, name, None) is not None]
        return (
            f"<TrajectoryGroup {self.env}/{self.instance_id}: {len(self)} sequences, {len(self.tokens)} tokens, "
            f"columns {', '.join(present)}>"
        )

    @property
    def id(self) -> GroupId:
        """Return the prompt that the group answers."""
        return GroupId(self.env, self.instance_id)

    @property
    def ids(self) -> list[TrajectoryId]:
        """Return the id of the rollout of each sequence."""
        return [TrajectoryId(self.env, self.instance_id, r) for r in self.rollout_ids.tolist()]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the columns."""
        return sum(column.nbytes for column in self.columns().values())

    def lengths(self) -> NDArray[np.int64]:
        """Return [S] the number of tokens of each sequence, prompt included."""
        return self.offsets[1:] - self.offsets[:-1]

    def completion_lengths(self) -> NDArray[np.int64]:
        """Return [S] the number of tokens of each sequence that the policy sampled and that train."""
        return count_between(self.loss_mask, self.offsets)

    def sequence_of_token(self) -> NDArray[np.int64]:
        """Return [N] the sequence of each token."""
        return np.repeat(np.arange(len(self)), self.lengths())

    # -- rows --------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: int) -> Trajectory:
        """Return row `index`, as views into this group."""
        s = range(len(self))[index]
        span = slice(int(self.offsets[s]), int(self.offsets[s + 1]))
        rows: dict[str, Any] = {
            name: None if (column := getattr(self, name)) is None else column[span] for name in TOKEN_COLUMNS
        }
        return Trajectory(
            id=TrajectoryId(self.env, self.instance_id, int(self.rollout_ids[s])),
            reward=float(self.rewards[s]),
            stop_reason=StopReason(int(self.stop_reasons[s])),
            policy_versions=self.policy_versions[span if self._over_tokens("policy_versions") else slice(s, s + 1)],
            **rows,
        )

    def __iter__(self) -> Iterator[Trajectory]:
        """Yield the rows, in order."""
        return (self[s] for s in range(len(self)))

    def _over_tokens(self, name: str) -> bool:
        """Return whether a column has an entry a token. Where S = N, `policy_versions` counts as one a sequence."""
        return name in TOKEN_COLUMNS or (name == "policy_versions" and len(self.policy_versions) != len(self))

    # -- derived groups ----------------------------------------------------------------------------------------------

    def with_rewards(self, rewards: ArrayLike, *, parts: Mapping[str, ArrayLike] | None = None) -> Self:
        """Return the same group with other `rewards` [S], and `parts` ([S] each) added to `reward_parts`.

        Parts are the amounts added to the rewards, or, with a `score` among them, all summands of the new ones:
        `reward_noise` follows from them. Parts that do not add up to the rewards are recorded and do not count.

        Raises:
            InvalidRecord: a column is not finite or has not one value a sequence, or the rewards differ by less than
                float32 can hold.
        """
        columns = {"rewards": as_column("rewards", rewards, np.float32)}
        columns |= {PART_PREFIX + k: as_column(PART_PREFIX + k, v, np.float32) for k, v in (parts or {}).items()}
        check_axes(columns, dict.fromkeys(columns, GROUP_RULES["rewards"]), {"S": len(self)})
        check_distinct(np.asarray(rewards))
        checked = columns.pop("rewards")
        added = {name.removeprefix(PART_PREFIX): column for name, column in columns.items()}
        noise = None
        if added or self.reward_noise is not None:
            before = rounding(self.rewards) if self.reward_noise is None else self.reward_noise.astype(np.float64)
            noise = noise_of_sum(checked, self.rewards, before, added).astype(np.float32)
        freeze([checked, noise, *added.values()])
        return msgspec.structs.replace(
            self, rewards=checked, reward_noise=noise, reward_parts=self.reward_parts | added
        )

    def with_advantages(self, advantages: ArrayLike) -> Self:
        """Return the same group with `advantages`, one a token ([N]) or a sequence ([S], spread over the loss mask).

        Raises:
            InvalidRecord: the advantages are not finite or fit neither axis.
        """
        column = as_column("advantages", advantages, np.float32)
        if column.shape == (len(self),) != self.tokens.shape:
            column = np.where(self.loss_mask, column[self.sequence_of_token()], np.float32(0))
        check_axes({"advantages": column}, {"advantages": GROUP_RULES["advantages"]}, {"N": len(self.tokens)})
        freeze([column])
        return msgspec.structs.replace(self, advantages=column)

    def select(self, keep: NDArray[np.bool_]) -> Self:
        """Return a copy of the sequences where `keep` [S] is true; `meta` stays as it is.

        Raises:
            InvalidRecord: `keep` is false everywhere.
        """
        if not keep.any():
            raise InvalidRecord("select: expected to keep at least one sequence, got none")
        tokens = keep[self.sequence_of_token()]
        taken = {
            name: column[tokens if self._over_tokens(name) else keep]
            for name, column in self.columns().items()
            if name != "offsets"
        }
        taken["offsets"] = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths()[keep])])
        freeze(taken.values())
        return self.assemble(self.header(), taken)

    def owned(self) -> Self:
        """Return a copy in private memory.

        A stage that keeps a group while it waits for more keeps this, not the original: the original may lie in a
        producer's slots, and holding those starves the producer.
        """
        copies = {name: column.copy() for name, column in self.columns().items()}
        freeze(copies.values())
        return self.assemble(self.header(), copies)

    # -- encoding ----------------------------------------------------------------------------------------------------

    def columns(self) -> dict[str, Array]:
        """Return the arrays that are present, by name; reward parts as `reward_parts.<name>`."""
        return self.schema.columns(self)

    def header(self) -> bytes:
        """Return the fields that are not columns, as msgpack."""
        return _encode_header((self.env, self.instance_id, self.meta))

    @classmethod
    def assemble(cls, header: bytes | memoryview, columns: Mapping[str, Any]) -> Self:
        """Return the group of `header` and `columns`. The columns are trusted: `GROUP_SCHEMA` has checked them.

        Raises:
            InvalidRecord: the header is malformed.
        """
        env, instance_id, meta = decode_header(header)
        return cls(env=env, instance_id=instance_id, meta=meta, **cls.schema.fields(columns))


def check_branches(group: TrajectoryGroup) -> None:
    """Raise an error if the sequences of a rollout do not lie together, or differ in what a rollout has once.

    Raises:
        InvalidRecord: they do.
    """
    starts = group.rollout_starts()
    ids = group.rollout_ids[starts].tolist()
    if len(set(ids)) != len(ids):
        raise InvalidRecord(
            f"rollout_ids: expected the sequences of a rollout one after another, got {group.rollout_ids.tolist()}"
        )
    if len(starts) == len(group):
        return
    owners = group.rollout_of_sequence()
    given = {"rewards": group.rewards, "reward_noise": group.reward_noise}
    given |= {PART_PREFIX + name: part for name, part in group.reward_parts.items()}
    for name, column in given.items():
        if column is not None and not np.array_equal(column, column[starts][owners]):
            raise InvalidRecord(
                f"{name}: expected one value for all sequences of a rollout, got {column.tolist()} with rollout_ids "
                f"{group.rollout_ids.tolist()}: give the rewards of its turns as token_rewards"
            )


def check_meta(meta: Mapping[str, Any]) -> None:
    """Raise an error if `meta` cannot be sent.

    Raises:
        InvalidRecord: it has a value that JSON, or msgpack, cannot hold, or keys that are not text.
    """
    if not meta:
        return
    try:
        _decode_header(_encode_header(("", "", meta)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRecord(f"meta: expected values that JSON can hold, with str keys ({error})") from None


def decode_header(header: bytes | memoryview) -> tuple[str, str, JsonObject]:
    """Return environment, instance and metadata.

    Raises:
        InvalidRecord: the header is malformed.
    """
    try:
        return _decode_header(header)
    except UNREADABLE as error:
        raise InvalidRecord(f"header: expected (env, instance_id, meta), got {error}") from None


_encode_header = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(tuple[Line, Line, JsonObject]).decode


def _flat(name: str, values: ArrayLike | Sequence[ArrayLike]) -> Array:
    """Return one array of values that were given flat or as one row a sequence."""
    if isinstance(values, np.ndarray):
        return values
    rows = list(values) if isinstance(values, Sequence) else [values]
    if not rows or np.ndim(rows[0]) == 0:
        return np.array(rows)
    try:
        if max(map(np.ndim, rows)) == len(GROUP_RULES[name].axes[0]) - 1:
            return np.array(rows)
        arrays = [np.asarray(row) for row in rows]
        return np.concatenate([array for array in arrays if array.size] or arrays)  # [] has no dtype of its own
    except ValueError as error:
        raise InvalidRecord(f"{name}: expected rows of one depth and width, got others ({error})") from None


def check_support(tokens: NDArray[np.int32], loss_mask: NDArray[np.bool_], support: NDArray[np.int32]) -> None:
    """Check a column `support_ids` [N, W]: no id below −1, and each sampled token among those that it was drawn from.

    Raises:
        InvalidRecord: naming the first that is not.
    """
    if support.size and support.min() < -1:
        raise InvalidRecord(f"support_ids: expected ids of 0 or more, or −1 for none, got {support.min()}")
    own = support[loss_mask]
    outside = (own != tokens[loss_mask][:, None]).all(1) & (own >= 0).any(1)
    if outside.any():
        place = int(np.flatnonzero(loss_mask)[outside.argmax()])
        known = support[place][support[place] >= 0]
        raise InvalidRecord(
            f"support_ids: expected each sampled token among those that it was drawn from, got {tokens[place]} at "
            f"token {place}, drawn from {known.tolist()}"
        )
