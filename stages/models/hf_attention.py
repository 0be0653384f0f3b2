"""The attention of an HFModel by torch's own kernels, without a mask of all tokens by all tokens.

Transformers passes a mask of four dimensions to each layer as it is. Instead of a mask, `sight` makes a small tensor
for all layers: empty for rows of one sequence, where causality alone hides keys; the starts of sequences for `varlen`,
if the device has that kernel, with sliding windows or without; else the sequences of keys, for masks of blocks of
queries. Without that kernel a layer with a sliding window multiplies blocks of queries only with the keys in reach. A
sink of attention, a learned score in each softmax (GPT-OSS), is one more key, of zeros. The tensor is an argument of
the layers, so checkpointed activations, FSDP2 and torch.compile treat it as any other.

Axes: B rows, H heads, T tokens of this call, K keys of a layer, D width of a head. The keys are those of the cache (a
layer with a sliding window may keep only the last ones), then the T of this call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..contracts.attention import Attention
from ..contracts.autocast import autocast_on
from ..contracts.varlen import any_length, computes, is_for, sequences_of, varlen

NAME = "penstock_kernels"
"""Name of this attention in transformers; one with `sdpa` in it is refused for models without transformers' own."""

PROBE = "penstock_probe"
"""Name of an attention that records the arguments of the layers."""

LARGEST_MASK = 1 << 24
"""Elements of the largest mask of full attention: those of a row of 4096 tokens."""

SMALLEST_BLOCK, LARGEST_BLOCK = 128, 2048
"""Queries of a block of a sliding window: as many as the window has keys, between these bounds."""

KNOWN_LAYERS = {"full_attention", "sliding_attention"}

Forward = Callable[..., tuple[Tensor, None]]
"""The attention `sdpa` of transformers: it repeats the heads of keys if the kernel needs that."""


class Heads(NamedTuple):
    """Queries, keys and values of a layer."""

    query: Tensor
    """[B, H, T, D]"""
    key: Tensor
    """[B, heads of keys, K, D]"""
    value: Tensor
    """[B, heads of keys, K, D]"""

    def between(self, queries: slice, keys: slice) -> Heads:
        """Return some of its queries and keys."""
        return Heads(self.query[:, :, queries], self.key[:, :, keys], self.value[:, :, keys])


def replaces(module: Any) -> bool:
    """Return whether `module` was loaded with the kernel that `install` replaces: `sdpa`, or `eager` with sinks.

    Transformers has no `sdpa` for sinks, and its `eager` lets packed sequences of GPT-OSS see each other.
    """
    kernel = module.config._attn_implementation  # noqa: SLF001 (there is no public name)
    return kernel == "sdpa" or (kernel == "eager" and _has_sinks(module))


def kernel_to_load(module_class: Any, attention: str) -> str:
    """Return the kernel to load a model of `module_class` with, if `attention` is asked for; see `replaces`."""
    return "eager" if attention == "sdpa" and not module_class._supports_sdpa else attention  # noqa: SLF001 (there is no public name)


def _has_sinks(module: Any) -> bool:
    return any(name.endswith(".sinks") for name, _ in module.named_parameters())


def install(module: Any) -> bool:
    """Replace the kernel of `module`, a causal model of transformers; return false if it needs transformers' own masks.

    Those are needed by a model with chunks, prefixes, layers without attention, or layers that do not pass their
    sliding window.
    """
    config = module.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or KNOWN_LAYERS)
    causal = getattr(config, "is_causal", True) and getattr(config, "attention_chunk_size", None) is None
    passes_arguments = module._supports_attention_backend and module._supports_flash_attn  # noqa: SLF001 (they have no public names)
    if not (causal and passes_arguments and layers <= KNOWN_LAYERS):
        return False
    _register()
    if window_of(module) is not None and not _passes_window(module):
        return False
    module.set_attn_implementation(NAME)
    return bool(config._attn_implementation == NAME)  # noqa: SLF001 (as above)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 (they take seconds to import)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415

    AttentionInterface.register(NAME, partial(attention, sdpa_attention_forward))
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for direct calls of the model of transformers
    AttentionMaskInterface.register(PROBE, sdpa_mask)


def _passes_window(module: Any) -> bool:
    """Return whether a layer of `module` passes its sliding window to its attention. Calls the model with a token."""
    from transformers import AttentionInterface  # noqa: PLC0415 (takes seconds to import)

    windows = list[int | None]()

    def recorded(_: Any, query: Tensor, __: Tensor, value: Tensor, *___: Any, **options: Any) -> tuple[Tensor, None]:
        windows.append(options.get("sliding_window"))
        return query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1]), None

    own = module.config._attn_implementation  # noqa: SLF001 (there is no public name)
    AttentionInterface.register(PROBE, recorded)
    module.set_attn_implementation(PROBE)
    token = torch.zeros(1, 1, dtype=torch.int64, device=module.device)
    try:
        with torch.no_grad():
            module(input_ids=token, position_ids=token, use_cache=False)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):  # a router may not run without weights
        return False
    finally:
        module.set_attn_implementation(own)
    return any(window is not None for window in windows)


def window_of(module: Any) -> int | None:
    """Return the number of keys that a token sees in layers with a sliding window; None without such layers."""
    config = module.config.get_text_config()
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    window: int | None = getattr(config, "sliding_window", None) if "sliding_attention" in layers else None
    return window


def sight(attend: Attention, dtype: torch.dtype, window: int | None) -> Tensor:
    """Return `attend` for the layers, as a tensor of four dimensions.

    One of: [B, 1, 1, 0] int64 if causality alone hides keys; [1, 1, 1, number + 1] int32, the starts of sequences where
    `varlen` computes; [B, 1, 1, K] int64, the sequence of each key; a small mask [B, 1, T, K] `dtype` to add to scores,
    shared by all layers.

    Args:
        attend: the keys that each token may see.
        dtype: dtype of queries.
        window: result of `window_of`.
    """
    sequences, tokens = attend.sequences, attend.tokens
    rows, keys = sequences.shape
    windowed = window is not None and window < keys
    starts = attend.cu_seqlens if is_for(sequences.device, dtype) else None
    if attend.one_sequence and not (windowed and starts is not None):
        return sequences[:, None, None, :0]
    if starts is not None:
        return starts.view(1, 1, 1, -1)
    if rows * tokens * keys > LARGEST_MASK or (windowed and tokens > 1):
        return sequences[:, None, None]
    zeros = torch.zeros(rows, 1, tokens, keys, dtype=dtype, device=sequences.device)
    return zeros.masked_fill_(~attend.mask[:, None], -torch.inf)


def attention(  # noqa: PLR0917 (transformers' own signature)
    forward: Forward,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention [B, T, H, D] of a layer of transformers; see its `AttentionInterface`.

    Args:
        forward: the attention `sdpa` of transformers.
        module: the layer.
        query: see `Heads`.
        key: see `Heads`.
        value: see `Heads`.
        attention_mask: the result of `sight`; or a mask [B, 1, T, K] bool that transformers made, used as is.
        sliding_window: number of keys that a token sees, itself included; None for all.
        s_aux: [H] a score in the softmax of each token of a head, which has no value; None without.
        options: see transformers.
    """
    call: Forward = partial(_called, forward, module, **options)
    if s_aux is not None:
        call = partial(_with_sinks, call, s_aux)
    heads, tokens, keys = Heads(query, key, value), query.shape[2], key.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < keys else None
    if attention_mask is None or attention_mask.dtype == torch.bool:
        return call(*heads, attention_mask)
    if attention_mask.dtype == torch.int32:
        if s_aux is None and computes(*heads, options.get("dropout", 0.0)):
            dtype, scale = autocast_on(query.device) or query.dtype, options.get("scaling")
            return varlen(*heads, attention_mask.flatten(), dtype=dtype, scale=scale, window=window), None
        attention_mask = sequences_of(attention_mask.flatten(), len(query), keys)[:, None, None]
    seen = attention_mask[..., -keys:]
    if window is None and seen.shape[-1] == 0 and s_aux is None:
        return call(*heads, None)
    if window is None and seen.is_floating_point():
        return call(*heads, seen.to(query.dtype))
    if window is not None and tokens == keys and tokens > 2 * window + SMALLEST_BLOCK:
        return _by_windows(call, heads, seen, window), None
    return _by_blocks(call, heads, seen, window), None


def _called(forward: Forward, module: Any, query: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
    with any_length(query.device):
        return forward(module, query, *arguments, **options)


def _with_sinks(  # noqa: PLR0917 (as in the calls of `Forward`)
    call: Forward, sinks: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, None]:
    """Return the attention of `call` with one more key and value of zeros, which has the scores `sinks` [H].

    Source: gpt-oss, `sdpa` in gpt_oss/torch/model.py; github.com/openai/gpt-oss. As there, a kernel gets a mask for
    each head.
    """
    rows, heads, tokens, _ = query.shape
    keys = key.shape[2]
    if mask is None:
        mask = torch.ones(tokens, keys, dtype=torch.bool, device=query.device).tril_(keys - tokens)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    of_heads = sinks.to(query.dtype).view(1, heads, 1, 1).expand(rows, heads, tokens, 1)
    scores = torch.cat([mask.to(query.dtype).expand(rows, heads, tokens, keys), of_heads], dim=-1)
    return call(query, pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1)), scores)


def _by_blocks(call: Forward, heads: Heads, seen: Tensor, window: int | None) -> Tensor:
    """Return attention by blocks of queries, with masks of at most `LARGEST_MASK` elements, or of one query a row."""
    rows, tokens, keys = len(heads.query), heads.query.shape[2], heads.key.shape[2]
    if rows * tokens * keys <= LARGEST_MASK:
        return call(*heads, _mask(seen, keys - tokens, 0, keys, window))[0]
    before, step, parts = keys - tokens, max(1, LARGEST_MASK // (rows * keys)), list[Tensor]()
    for start in range(before, keys, step):
        stop = min(start + step, keys)
        first = 0 if window is None else max(0, start + 1 - window)
        block = heads.between(slice(start - before, stop - before), slice(first, stop))
        parts.append(call(*block, _mask(seen, start, first, stop, window))[0])
    return torch.cat(parts, dim=1)


def _mask(seen: Tensor, start: int, first: int, stop: int, window: int | None) -> Tensor:
    """Return the mask of the queries from `start` and the keys from `first`, both before `stop`, as indices of keys."""
    places = torch.arange(first, stop, device=seen.device)
    visible = _near(places[start - first :], places, window)
    if seen.is_floating_point():
        before = seen.shape[-1] - seen.shape[-2]
        return visible & (seen[:, :, start - before : stop - before, first:stop] == 0)
    return visible if seen.shape[-1] == 0 else visible & (seen[..., start:stop].mT == seen[..., first:stop])


def _near(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return the mask [1, 1, number of `queries`, number of `keys`] of the keys in reach, by their indices."""
    distance = queries[None, None, :, None] - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _by_windows(call: Forward, heads: Heads, seen: Tensor, window: int) -> Tensor:
    """Return the attention of rows longer than `window`, without a cache.

    The first tokens, as many as the window has keys, see all before them. The others are in blocks, each with its own
    keys and the window before them, all in one call. The last block is filled up.
    """
    rows, _, tokens, _ = heads.query.shape
    block = min(max(window, SMALLEST_BLOCK), LARGEST_BLOCK)
    count = (tokens - window + block - 1) // block
    fill = window + count * block - tokens

    def blocks(each: Tensor, size: int) -> Tensor:
        parts = pad(each, (0, 0, 0, fill)).unfold(2, size, block)
        return parts.permute(0, 2, 1, 4, 3).flatten(0, 1)

    queries = blocks(heads.query[:, :, window:], block)
    keys, values = (blocks(each, window + block) for each in (heads.key, heads.value))
    places = torch.arange(window + block, device=queries.device)
    mask, start = _near(places[window:], places, window), None
    if seen.shape[-1]:
        sequences = (
            pad(seen[:, 0, 0], (0, fill), value=-1).unfold(1, window + block, block).flatten(0, 1)[:, None, None]
        )
        mask = mask & (sequences[..., window:].mT == sequences)
        start = _mask(seen, 0, 0, window, None)
    first = call(*heads.between(slice(window), slice(window)), start)[0]
    others = call(queries, keys, values, mask)[0].reshape(rows, count * block, *first.shape[2:])
    return torch.cat([first, others[:, : tokens - window]], dim=1)
