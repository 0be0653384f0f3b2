"""Independence of the sequences of an HFModel from others beside them: decided by its layers, then proved by calls.

A layer with a state, or a convolution over tokens, reads the sequence before its own, by as little as its weights let
it: a threshold misses it while they are small, and they grow while they train. So the types of the layers decide first:
rows of such a model have one sequence, with padding behind it alone. In all other models, the mask of a kernel gives
other sequences the weight 0. Either way a change of the rest of a row changes no bit of a sequence's logits, and with a
cache they are those without, whatever rows joined. Knows no trainer.

Axes: L tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from ..._pipeline.errors import InvalidConfig
from ..contracts.attention import Attention
from ..contracts.causal_model import JoinableCache, positions_of
from .hf_attention import NAME

ATTENTION_LAYERS = {"attention", "chunked_attention", "full_attention", "sliding_attention"}
"""Types of layers, by the names of transformers 4 and 5, with a view that the mask alone decides."""

ONE_SEQUENCE_LAYERS = {"conv", "hybrid", "hybrid_sliding", "indexed_attention", "linear_attention"}
"""Types of layers that need rows of one sequence, by the names of transformers 5: their state is that of all tokens
before, or they choose their keys by an index among those of all sequences."""

NO_TOKENS = {"mlp", "moe"}
"""Types of layers that read each token by itself."""

LENGTH = 13
"""Tokens of each of the two sequences; no model has 26 heads, experts or groups."""

TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Difference of a sequence's logits in two places of a row, as a share of the largest, that rounding explains. In lower
precision rounding may choose other experts, and explains any."""

CHOICES = {torch.topk, Tensor.topk, torch.max, Tensor.max}
"""Functions that choose the experts of a mixture."""


class Packs(Protocol):
    """A model of transformers."""

    @property
    def module(self) -> Any:
        """Return the model of transformers."""
        ...

    @property
    def vocabulary(self) -> int:
        """Return the number of its tokens."""
        ...

    @property
    def packs(self) -> bool:
        """Return whether a row may have several sequences."""
        ...

    def __call__(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: Any = None) -> Tensor:
        """Return logits; see `CausalModel`."""
        ...

    def new_cache(self, batch: int, capacity: int) -> Any:
        """Return an empty cache; see `CausalModel`."""
        ...


def packs(module: Any) -> bool:
    """Return whether no layer of `module`, a causal model of transformers, keeps a state of the tokens before."""
    return not _state_of(module)


def has_keys(module: Any) -> bool:
    """Return whether a layer of `module` keeps keys of the tokens before, or its layer_types do not tell."""
    return not _types(module) or bool(_types(module) - {"conv", "linear_attention"} - NO_TOKENS)


def check_layers(module: Any, name: str) -> None:
    """Check that the states of the layers of `module` are those of the tokens before alone, and can be cached by rows.

    Raises:
        InvalidConfig: a layer is of another kind, or the model has a cache of its own.
    """
    if (state := _state_of(module)) and (reason := _refused(module)):
        raise InvalidConfig(
            f"{name}: expected a model of layers that read the tokens before by attention or by a state of theirs, got "
            f"a {type(module).__name__} with {state}, {reason}: use a model whose layer_types are of "
            f"{', '.join(sorted({*ATTENTION_LAYERS, *ONE_SEQUENCE_LAYERS} - {'attention'}))}"
        )


def _refused(module: Any) -> str:
    """Return why a model with states is refused; empty if it is not."""
    from transformers import DynamicCache  # noqa: PLC0415 (takes seconds to import)

    types = _types(module)
    if unknown := sorted(types - ATTENTION_LAYERS - ONE_SEQUENCE_LAYERS - NO_TOKENS):
        return f"of which {', '.join(unknown)} is not known to be causal"
    if not types & ONE_SEQUENCE_LAYERS:
        return "which its layer_types do not state"
    defined = vars(sys.modules[type(module).__module__]).values()
    own = [
        each
        for each in defined
        if isinstance(each, type) and issubclass(each, DynamicCache) and each is not DynamicCache
    ]
    return f"whose states are in a {own[0].__name__} of its own, which rows cannot join" if own else ""


def _types(module: Any) -> set[str]:
    config = module.config.get_text_config()
    return set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def _state_of(module: Any) -> str:
    """Return the parts of `module` that mix tokens besides attention; empty if there are none."""
    types = _types(module)
    if others := sorted(types - ATTENTION_LAYERS - NO_TOKENS):
        return f"layers of the types {', '.join(others)}" if len(others) > 1 else f"layers of the type {others[0]}"
    if not types and getattr(module, "_is_stateful", False):
        return "recurrent layers"
    found = {type(each).__name__ for each in module.get_decoder().modules() if isinstance(each, nn.Conv1d | nn.RNNBase)}
    return f"layers of the class {min(found)}" if found else ""


@torch.no_grad()
def check_calls(model: Packs, device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Check that no bit of a sequence's logits depends on the rest of its row, and no more than rounding on its place.

    The rest is the sequence before it; in a model with states, which has one sequence in a row, the padding behind it.
    Calls `model` on `device` with its parameters, in `dtype`: that of the caller's autocast, for one.

    Raises:
        InvalidConfig: a bit does.
    """
    generator = torch.Generator().manual_seed(0)
    other, own = torch.randint(model.vocabulary, (2, LENGTH), generator=generator).to(device)
    kept, rest = (slice(LENGTH, None), slice(LENGTH)) if model.packs else (slice(LENGTH), slice(LENGTH, None))
    changed = (other, own) if model.packs else (own, other)
    same = _logits(model, own, own)
    leak = _difference(same[kept], _logits(model, *changed)[kept])
    if leak:  # of a mixture of experts, whose products have other shapes where others were chosen, it may be rounding
        with _Choices(rest, kept) as chosen:
            same = _logits(model, own, own)
            chosen.again()
            leak = _difference(same[kept], _logits(model, *changed)[kept])
    moved = _difference(same[kept], same[rest] if model.packs else _logits(model, own))
    if leak or moved > TOLERANCES.get(dtype, torch.inf) * same[kept].abs().max():
        raise InvalidConfig(_message(model, name, leak, moved))


@torch.no_grad()
def check_cached(model: Packs, device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Check that a token that is read with a cache, beside a shorter row, has the logits that it has without.

    In other dtypes than float32 and float64 rounding explains any difference.

    Raises:
        InvalidConfig: it has others.
    """
    if dtype not in TOLERANCES:
        return
    generator = torch.Generator().manual_seed(0)
    own, other = torch.randint(model.vocabulary, (2, LENGTH), generator=generator).to(device)
    expected, other = _logits(model, own)[-1], other[:5]
    prompts = [own[:-1], other[:-1]]
    cache = _cache_of(model, prompts)
    tokens, positions = (torch.stack([own[-1:], other[-1:]]), torch.tensor([[len(each)] for each in prompts]))
    attend = Attention.causal(_real([own, other]), tokens=1)
    found = model(tokens, positions=positions.to(own.device), attend=attend, cache=cache)[0, -1]
    differs = _difference(found, expected)
    if differs > TOLERANCES[dtype] * expected.abs().max():
        raise InvalidConfig(
            f"{name}: expected a model with the same logits with a cache as without, got a "
            f"{type(model.module).__name__}, whose logits differ by {differs:.2g}: use another attention, or a model "
            f"of full_attention alone"
        )


def _cache_of(model: Packs, prompts: list[Tensor]) -> Any:
    """Return the cache of two prompts of different lengths."""
    if isinstance(model.new_cache(1, 1), JoinableCache):
        cache, other = (_cache_of_row(model, each[None], _real([each])) for each in prompts)
        cache.join(other)
        return cache
    width = len(prompts[0])
    return _cache_of_row(model, torch.stack([pad(each, (width - len(each), 0)) for each in prompts]), _real(prompts))


def _cache_of_row(model: Packs, tokens: Tensor, real: Tensor) -> Any:
    cache = model.new_cache(len(tokens), tokens.shape[1] + 1)
    model(tokens, positions=positions_of(real), attend=Attention.causal(real), cache=cache)
    return cache


def _real(rows: list[Tensor]) -> Tensor:
    """Return the mask [b, T] of the tokens of rows that are padded on the left."""
    width = max(map(len, rows))
    return torch.stack([torch.arange(width, device=each.device) >= width - len(each) for each in rows])


def _logits(model: Packs, *sequences: Tensor) -> Tensor:
    """Return the logits [n L, V] of a row of `sequences` [L]; of one and padding, if the model has one in a row."""
    count, device = len(sequences), sequences[0].device
    owners = torch.arange(count, device=device).repeat_interleave(LENGTH)[None]
    starts = LENGTH * torch.arange(count + 1, dtype=torch.int32, device=device)
    positions = torch.arange(LENGTH, device=device).repeat(count)[None]
    if not model.packs:
        owners, positions = torch.where(owners > 0, -1, owners), torch.arange(count * LENGTH, device=device)[None]
    attend = Attention.packed(owners, one_sequence=not model.packs, cu_seqlens=starts)
    logits: Tensor = model(torch.cat(sequences)[None], positions=positions, attend=attend)[0]
    return logits.nan_to_num()  # logits that are not finite are an error where tokens are drawn, and where they train


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of logits."""
    return float((one - other).abs().max())


def _message(model: Packs, name: str, leak: float, moved: float) -> str:
    module, before = model.module, "the sequence before" if model.packs else "the padding behind them"
    loaded = module.config._attn_implementation  # noqa: SLF001 (there is no public name)
    kernel = "sdpa" if loaded == NAME else loaded
    how = f"depend on {before} (by {leak:.2g}" if leak else f"depend on its place in the row (by {moved:.2g}"
    expected = "packed sequences do not see each other" if model.packs else "tokens do not see those behind them"
    return (
        f"{name}: expected a model in which {expected}, got a {type(module).__name__}, "
        f'whose logits {how}, with attention="{kernel}"): use another attention, or a model of full_attention alone'
    )


class _Choices(TorchFunctionMode):
    """Records the experts that tokens choose, and lets those of the rest of the row choose the same again."""

    def __init__(self, rest: slice, kept: slice) -> None:
        super().__init__()
        self._rest, self._kept = rest.start or 0, kept.start or 0
        """The first token of the rest, and that of the sequence whose logits are compared."""
        self._recorded: list[Tensor] = []
        """The indices of each choice in the first call."""
        self._left: list[Tensor] | None = None
        """Those that the second call has yet to make; None in the first call."""

    def again(self) -> None:
        """Begin the second call."""
        self._left = list(self._recorded)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function`, and in the second call replace its choice for the rest of the row."""
        found = function(*args, **(kwargs or {}))
        if function not in CHOICES or (axis := _tokens_of(args[0], found)) is None:
            return found
        if self._left is None:
            self._recorded.append(found.indices)
            return found
        again = self._left.pop(0).narrow(axis, self._rest, LENGTH)
        now = found.indices.narrow(axis, self._kept, LENGTH)
        indices = torch.cat([again, now] if self._rest < self._kept else [now, again], axis)
        return type(found)((args[0].gather(-1, indices), indices))


def _tokens_of(scores: Tensor, found: Any) -> int | None:
    """Return the axis of the tokens, one of the first two; None if `found` is no choice for each token of `scores`."""
    if isinstance(found, Tensor) or found.indices.shape[:-1] != scores.shape[:-1]:
        return None
    indices: Tensor = found.indices
    if indices.shape[0] == 2 * LENGTH:
        return 0
    return 1 if indices.shape[:2] == (1, 2 * LENGTH) else None
