"""Independence of the packed sequences of an HFModel: decided by its layers, then proved by two calls.

A layer with a state, or a convolution over tokens, reads the sequence before its own, by as little as its weights let
it: a threshold misses it while they are small, and they grow while they train. So the types of the layers decide first.
In all other models, the mask of a kernel gives other sequences the weight 0, so a change of one of them changes no bit
of the others' logits. Knows no trainer.

Axes: L tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._pipeline.errors import InvalidConfig
from ..contracts.attention import Attention

ATTENTION_LAYERS = {"attention", "chunked_attention", "full_attention", "sliding_attention"}
"""Types of layers, by the names of transformers 4 and 5, with a view that the mask alone decides.

Layers that choose their keys by an index, or compress them, choose among those of all sequences."""

LENGTH = 13
"""Tokens of each of the two sequences; no model has 26 heads, experts or groups."""

TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Difference of a sequence's logits in two places of a row, as a share of the largest, that rounding explains. In lower
precision rounding may choose other experts, and explains any."""

CHOICES = {torch.topk, Tensor.topk, torch.max, Tensor.max}
"""Functions that choose the experts of a mixture."""


class Packs(Protocol):
    """A model of transformers that takes packed rows."""

    @property
    def module(self) -> Any:
        """Return the model of transformers."""
        ...

    @property
    def vocabulary(self) -> int:
        """Return the number of its tokens."""
        ...

    def __call__(self, tokens: Tensor, *, positions: Tensor, attend: Attention) -> Tensor:
        """Return logits; see `CausalModel`."""
        ...


def check_layers(module: Any, name: str) -> None:
    """Check that no layer of `module`, a causal model of transformers, keeps a state of the tokens before.

    Raises:
        InvalidConfig: one does.
    """
    if state := _state_of(module):
        raise InvalidConfig(
            f"{name}: expected a model in which packed sequences do not see each other, got a {type(module).__name__} "
            f"with {state}, whose states pass from one sequence to the next: use a model of full_attention, "
            f"sliding_attention or chunked_attention alone"
        )


def _state_of(module: Any) -> str:
    """Return the parts of `module` that mix tokens besides attention; empty if there are none."""
    config = module.config.get_text_config()
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if others := sorted(set(types) - ATTENTION_LAYERS):
        return f"layers of the types {', '.join(others)}" if len(others) > 1 else f"layers of the type {others[0]}"
    if not types and getattr(module, "_is_stateful", False):
        return "recurrent layers"
    found = {type(each).__name__ for each in module.get_decoder().modules() if isinstance(each, nn.Conv1d | nn.RNNBase)}
    return f"layers of the class {min(found)}" if found else ""


@torch.no_grad()
def check_calls(model: Packs, device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Check that no bit of a sequence's logits depends on the sequence before, and no more than rounding on its place.

    Calls `model` on `device` with its parameters, in `dtype`: that of the caller's autocast, for one.

    Raises:
        InvalidConfig: a bit does.
    """
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(model.vocabulary, (2, LENGTH), generator=generator).to(device)
    same = _logits(model, second, second)
    leak = _leak(same, _logits(model, first, second))
    if leak:  # of a mixture of experts, whose products have other shapes where others were chosen, it may be rounding
        with _Choices() as chosen:
            same = _logits(model, second, second)
            chosen.again()
            leak = _leak(same, _logits(model, first, second))
    moved = (same[:LENGTH] - same[LENGTH:]).abs().max()
    if leak or moved > TOLERANCES.get(dtype, torch.inf) * same[:LENGTH].abs().max():
        raise InvalidConfig(_message(model.module, name, leak, float(moved)))


def _logits(model: Packs, first: Tensor, second: Tensor) -> Tensor:
    """Return the logits [2 L, V] of a row of two sequences [L]."""
    positions = torch.arange(LENGTH, device=first.device).repeat(2)[None]
    sequences = torch.arange(2, device=first.device).repeat_interleave(LENGTH)[None]
    starts = LENGTH * torch.arange(3, dtype=torch.int32, device=first.device)
    attend = Attention.packed(sequences, cu_seqlens=starts)
    logits: Tensor = model(torch.cat([first, second])[None], positions=positions, attend=attend)[0]
    return logits.nan_to_num()  # logits that are not finite are an error where tokens are drawn, and where they train


def _leak(one: Tensor, other: Tensor) -> float:
    """Return the largest difference between the logits of the second sequence in two rows [2 L, V]."""
    return float((one[LENGTH:] - other[LENGTH:]).abs().max())


def _message(module: Any, name: str, leak: float, moved: float) -> str:
    kernel = module.config._attn_implementation.removeprefix("penstock_")  # noqa: SLF001 (there is no public name)
    how = f"depend on the sequence before (by {leak:.2g}" if leak else f"depend on its place in the row (by {moved:.2g}"
    return (
        f"{name}: expected a model in which packed sequences do not see each other, got a {type(module).__name__}, "
        f'whose logits {how}, with attention="{kernel}"): use another attention, or a model of full_attention alone'
    )


class _Choices(TorchFunctionMode):
    """Records the experts that tokens choose, and lets the tokens of the first sequence choose the same again."""

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[Tensor] = []
        """The indices of each choice in the first call."""
        self._left: list[Tensor] | None = None
        """Those that the second call has yet to make; None in the first call."""

    def again(self) -> None:
        """Begin the second call."""
        self._left = list(self._recorded)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function`, and in the second call replace its choice for the first sequence."""
        found = function(*args, **(kwargs or {}))
        if function not in CHOICES or (axis := _tokens_of(args[0], found)) is None:
            return found
        if self._left is None:
            self._recorded.append(found.indices)
            return found
        before, now = self._left.pop(0).narrow(axis, 0, LENGTH), found.indices.narrow(axis, LENGTH, LENGTH)
        indices = torch.cat([before, now], axis)
        return type(found)((args[0].gather(-1, indices), indices))


def _tokens_of(scores: Tensor, found: Any) -> int | None:
    """Return the axis of the tokens, one of the first two; None if `found` is no choice for each token of `scores`."""
    if isinstance(found, Tensor) or found.indices.shape[:-1] != scores.shape[:-1]:
        return None
    indices: Tensor = found.indices
    if indices.shape[0] == 2 * LENGTH:
        return 0
    return 1 if indices.shape[:2] == (1, 2 * LENGTH) else None
