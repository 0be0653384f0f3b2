"""Distributions of tokens under a model: of the tokens of a micro-batch that train, or of requested tokens.

Axes: S sequences, N tokens, T of them that train or are requested.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from inspect import signature
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._pipeline.errors import InvalidConfig
from ..._schemas import Array, InvalidRecord, TrajectoryGroup
from ..._schemas.batch import PackedGroup
from ..._schemas.columns import run_starts
from ..._schemas.conversion import convert
from ..contracts.attention import Attention
from ..contracts.autocast import autocast_on, computing_in
from ..contracts.causal_model import CausalModel, HasVocabulary, check_packing, packs, positions_in
from ..contracts.sampling_params import TEMPERATURES
from ..contracts.support import SUPPORT
from ..losses.distributions import Distributions
from ..losses.products import dtype_of_inputs
from ..losses.tiles import Finish
from .micro_batches import MicroBatch, Packed, Sequences, micro_batches
from .torch_sharding import bare

TEMPERATURE = "temperature"
"""A column of a micro-batch: the temperature of each token's score."""

_Part: TypeAlias = tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[float, msgspec.Meta(gt=0)]]
"""Tokens, and their temperature."""

R = TypeVar("R")

Sampled: TypeAlias = TrajectoryGroup | PackedGroup


def reads(model: Any) -> bool:
    """Return whether `model` passes hidden states to `read`; see `CausalModel`. Others return logits."""
    call = model.forward if isinstance(model, torch.nn.Module) else model.__call__
    return "read" in signature(call).parameters


class Reader(Generic[R]):
    """Makes the distributions of the tokens of a micro-batch that train, and passes them to a function; see `Read`."""

    __slots__ = ("_call", "_part", "_temperature", "_use")

    def __init__(self, part: MicroBatch, use: Callable[[Distributions], R], temperature: float) -> None:
        self._part = part
        self._use = use
        self._temperature = temperature
        self._call = _uncompiled() if "torch._dynamo" in sys.modules else _call
        """Calls a function without tracing it, if torch.compile was used before: the number of chunks differs between
        micro-batches."""

    def __call__(
        self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None = None, finish: Finish | None = None
    ) -> R:
        """Return the result of the function; see `Read`."""
        result: R = self._call(self._called, hidden, weight, bias, finish)
        return result

    def _called(self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, finish: Finish | None) -> R:
        wanted = hidden.flatten(0, 1).index_select(0, self._part.predicted_at)
        own = self._part.columns.get(TEMPERATURE)
        temperature = self._temperature if own is None else own[:, None]
        around = autocast_on(hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            states = wanted if weight is None else wanted.to(dtype_of_inputs(weight, around))
            support = self._part.columns.get(SUPPORT)
            return self._use(Distributions(states, weight, bias, finish, temperature, support))


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@cache
def _uncompiled() -> Callable[..., Any]:
    """Return a function like `_call`; it is made late, for the compiler takes a second to import, and writes files."""
    made: Callable[..., Any] = torch.compiler.disable(_call)  # type: ignore[no-untyped-call]
    return made


def read_distributions(
    model: Callable[..., Any],
    part: MicroBatch,
    use: Callable[[Distributions], R],
    *,
    passes_hidden: bool,
    temperature: float = 1.0,
    autocast: torch.dtype | None = None,
) -> R:
    """Return the result of `use` on the distributions under `model` of the tokens of `part` that train.

    Args:
        model: a `CausalModel`, called once.
        part: the rows.
        use: called once; if the model passes hidden states, inside it: its tensors may be gathered there alone.
        passes_hidden: whether it does; see `reads`.
        temperature: logits are divided by it, unless `part` has a column with one for each token. A column `SUPPORT`
            restricts the distributions.
        autocast: dtype of the model's safe operations; None for the dtype of the model.
    """
    reader = Reader(part, use, temperature)
    found = _computed(model, part, reader if passes_hidden else None, autocast)
    result: R = found if passes_hidden else reader(found, None)
    return result


def read_values(model: Any, part: MicroBatch, autocast: torch.dtype | None) -> Tensor:
    """Return [T] float32 the values under `model` of the states before the tokens of `part` that train.

    Args:
        model: a `CausalModel` whose head has one output, or one that ranks share.
        part: the rows.
        autocast: dtype of the model's safe operations, without the head; None for the dtype of the model.

    Raises:
        InvalidConfig: the head has several outputs.
    """
    passes_hidden = reads(bare(model))
    reader = partial(_values, part)
    found: Tensor = _computed(model, part, reader if passes_hidden else None, autocast)
    return found if passes_hidden else _values(part, found, None)


def _values(
    part: MicroBatch,
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    finish: Finish | None = None,  # noqa: ARG001 (of logits alone)
) -> Tensor:
    """Return [T] the products of hidden states and the one row of the head; see `Read`."""
    if (outputs := hidden.shape[-1] if weight is None else len(weight)) != 1:
        raise InvalidConfig(
            f"critic: expected a model whose head has one output, the value, got {outputs}: use ValueModel, or replace "
            f"the head"
        )
    with torch.autocast(hidden.device.type, enabled=False):
        states = hidden.flatten(0, 1).index_select(0, part.predicted_at).float()
        if weight is None:
            return states.squeeze(-1)
        row = weight.float()[0]
        products = torch.mv(states, row)
        return products if bias is None else products + bias.float()


def _computed(model: Callable[..., Any], part: MicroBatch, reader: Any, autocast: torch.dtype | None) -> Any:
    """Return what `reader` makes of the rows of `part` inside `model`; without one, their logits."""
    alone = len(part.lengths) == len(part.tokens)
    attend = Attention.packed(part.sequences, one_sequence=alone, cu_seqlens=part.cu_seqlens)
    call = partial(model, part.tokens, positions=part.positions, attend=attend)
    with computing_in(autocast, part.tokens.device):
        return call() if reader is None else call(read=reader)


def scored_tokens(
    model: CausalModel,
    packed: Packed,
    micro_batch_tokens: int,
    use: Callable[[Distributions, Tensor], R],
    *,
    temperature: float = 1.0,
    own: Mapping[str, Array] | None = None,
) -> Iterator[tuple[NDArray[np.int64], R]]:
    """Yield the index [T] of some requested tokens among all N, and `use` of their distributions and ids [T].

    A micro-batch at a time. `own` are columns `TEMPERATURE` [N] and `SUPPORT` [N, W], as far as there are any.
    """
    device = next(model.parameters()).device
    known: dict[str, Array] = {"place": np.arange(len(packed.tokens)), **(own or {})}
    passes_hidden = reads(model)
    check_sequences(model, packed)
    check_packing(model)
    for part in micro_batches(packed, known, micro_batch_tokens, device, packs=packs(model)):
        of_part = partial(_called, use, part.targets)
        found = read_distributions(model, part, of_part, passes_hidden=passes_hidden, temperature=temperature)
        yield part.columns["place"].cpu().numpy(), found


def check_sequences(model: object, sequences: Sequences) -> None:
    """Check that `model` has a position and an embedding for each token, if it states how many it has.

    A device reports a token without an embedding by an error without its name, after which it computes no more.

    Raises:
        InvalidRecord: a sequence has more tokens than the model has positions, or a token that the model lacks.
    """
    bound, lengths = positions_in(model), np.diff(sequences.cu_seqlens)
    if bound is not None and len(lengths) and lengths.max() > bound:
        row = int(lengths.argmax())
        raise InvalidRecord(
            f"{_name_of(sequences, row)}: expected at most {bound} tokens, the positions of the model, got "
            f"{lengths[row]}: lower max_length of SourceEnv, or its prompts and max_completion_tokens"
        )
    if isinstance(model, HasVocabulary):
        for name, ids in (("tokens", sequences.tokens), (SUPPORT, getattr(sequences, SUPPORT, None))):
            if ids is not None and ids.size and ids.max() >= model.vocabulary:
                raise _unknown(sequences, name, ids, model)


def _unknown(sequences: Sequences, name: str, ids: NDArray[np.int32], model: HasVocabulary) -> InvalidRecord:
    """Return an error with the first id of a column [N] or [N, W] that `model` lacks."""
    place, *_ = np.argwhere(ids >= model.vocabulary)[0]
    row = int(np.searchsorted(sequences.cu_seqlens, place, side="right")) - 1
    return InvalidRecord(
        f"{_name_of(sequences, row)}: expected {name} below {model.vocabulary}, the vocabulary of a "
        f"{type(model).__name__}, got {np.max(ids[place])}: use the tokenizer of the model, and models that have the "
        f"same"
    )


def _name_of(sequences: Sequences, row: int) -> str:
    if isinstance(sequences, Packed):
        return f"sequence {row}"
    group = sequences.groups[sequences.group_of_sequence()[row]]
    return f"{group.env}/{group.instance_id}: repetition {sequences.rollout_ids[row]}"


def _called(use: Callable[[Distributions, Tensor], R], targets: Tensor, distributions: Distributions) -> R:
    return use(distributions, targets)


def own_temperatures(
    groups: Sequence[Sampled], repetitions: Iterable[NDArray[np.int64]], lengths: NDArray[np.int64], default: float
) -> NDArray[np.float32] | None:
    """Return [N] the temperature of each token's score; None if no group has its own.

    Args:
        groups: one behind the other. `meta["temperatures"]` of a group is a list with an entry for each repetition: a
            number, or parts `[tokens, temperature]` of its sequences, one behind the other, from the first token on.
        repetitions: the rollout of each sequence, of each group.
        lengths: [S] of all sequences.
        default: for sequences of groups without.

    Raises:
        InvalidRecord: a group lacks an entry for a repetition, or has an invalid one.
    """
    if not any(TEMPERATURES in group.meta for group in groups):
        return None
    found, end = [], 0
    for group, ids in zip(groups, repetitions, strict=True):
        starts, end = end + run_starts(ids), end + len(ids)
        tokens = np.add.reduceat(lengths[:end], starts).tolist()
        if TEMPERATURES in group.meta:
            rollouts = ids[starts - (end - len(ids))].tolist()
            found += [_own(group, rollout, length) for rollout, length in zip(rollouts, tokens, strict=True)]
        else:
            found.append(np.full(sum(tokens), default))
    return np.concatenate(found).astype(np.float32)


def _own(group: Sampled, repetition: int, length: int) -> NDArray[np.float64]:
    """Return [length] the temperatures of the tokens of a rollout."""
    temperatures = group.meta[TEMPERATURES]
    listed = isinstance(temperatures, list) and repetition < len(temperatures)
    found = temperatures[repetition] if listed else None
    try:
        parts = convert(found if isinstance(found, list) else [(length, found)], list[_Part])
    except msgspec.ValidationError:
        parts = []
    if sum(tokens for tokens, _ in parts) != length or not all(math.isfinite(value) for _, value in parts):
        raise InvalidRecord(
            f"{group.env}/{group.instance_id}: {TEMPERATURES}: expected a positive number for repetition {repetition}, "
            f"or parts [tokens, number] of its {length} tokens, got {found!r}"
        )
    return np.repeat([value for _, value in parts], [tokens for tokens, _ in parts])


def check_temperature(groups: Iterable[Sampled], temperature: float, scorer: str) -> None:
    """Check that groups were sampled at the temperature of `scorer`, if they contain theirs.

    Raises:
        InvalidRecord: a group was sampled at another; every ratio to its log-probabilities would be wrong.
    """
    for group in groups:
        sampled_at = group.meta.get("temperature", temperature)
        if sampled_at != temperature:
            raise InvalidRecord(
                f"{group.env}/{group.instance_id}: temperature: expected {temperature}, which this {scorer} was given, "
                f"got {sampled_at}, at which the group was sampled: set both to the same"
            )
