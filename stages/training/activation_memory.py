"""The tokens of a micro-batch that suit a device: a number for a CPU, and on a CUDA device as many as its memory holds.

A CPU has no use for large micro-batches. A CUDA device reads all weights for each, adds up a gradient of their size,
and waits for the host between them. The bytes that a token keeps for the backward pass are measured by two forward
passes of different lengths: their difference contains no weight and no cast of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..._pipeline.accounting.telemetry import get_logger

log = get_logger("penstock.torch_trainer")

TOKENS_ON_A_CPU = 3072
"""On one core a step on 12,000 tokens took 4.4 s and 0.7 GB with it, and 6.1 s and 1.8 GB as a whole. Smaller ones are
slower where the vocabulary is large, because each adds up a gradient of its matrix."""

CHOICES = 16_384, 8192, 4096, 2048
"""Tokens of a micro-batch on a CUDA device: the first that fits."""

SMALLEST = 1024
"""Taken if none of them fits."""

MEASURED = 512
"""Tokens of the longer row that measures the bytes of a token, if sequences have so many."""

SHARE = 0.9
"""Share of the free memory that a step may use: another process may share the device, and memory is in pieces."""

BACKWARD = 1.2
"""Factor of the bytes that a token keeps: a backward pass holds gradients of a layer beside them."""


def suitable_tokens(
    device: torch.device,
    parameters: Sequence[Tensor],
    forward: Callable[[int], object],
    longest: int,
    *,
    has_moments: bool,
) -> int:
    """Return the tokens of a micro-batch that suit `device`.

    Args:
        device: the device that trains.
        parameters: those that train.
        forward: calls the model with a row of that many tokens; its result holds the graph.
        longest: tokens of the longest sequence that it may be called with.
        has_moments: whether the optimizer has its state.
    """
    if device.type != "cuda":
        return TOKENS_ON_A_CPU
    later = (1 if has_moments else 3) * sum(each.numel() * each.element_size() for each in parameters)
    with torch.random.fork_rng([device]):  # so that a resumed run draws the numbers of an uninterrupted one
        of_a_token = bytes_of_a_token(forward, max(2, min(MEASURED, longest)))
    free = free_bytes(device)
    tokens = fitting_tokens(free, later, of_a_token)
    log.info("micro_batch_tokens_chosen", tokens=tokens, bytes_of_a_token=int(of_a_token), free_bytes=free)
    return tokens


def fitting_tokens(free: int, later: int, of_a_token: float) -> int:
    """Return the tokens of a micro-batch on a CUDA device.

    Args:
        free: bytes that are free before the first step.
        later: bytes of them that gradients, and moments of the optimizer, will take.
        of_a_token: bytes that a token keeps for the backward pass.
    """
    bound = (SHARE * free - later) / (BACKWARD * max(of_a_token, 1.0))
    return next((tokens for tokens in CHOICES if tokens <= bound), SMALLEST)


def bytes_of_a_token(forward: Callable[[int], object], longest: int) -> float:
    """Return the bytes that a token keeps for the backward pass, by rows of `longest` tokens, at least 2, and half."""
    short = longest // 2
    return (_kept(forward, longest) - _kept(forward, short)) / (longest - short)


def _kept(forward: Callable[[int], object], tokens: int) -> int:
    """Return the bytes that a forward pass keeps."""
    with _kept_tensors() as sizes:
        forward(tokens)
    return sum(sizes.values())


@contextmanager
def _kept_tensors() -> Iterator[dict[int, int]]:
    """Yield the size of each memory that a forward pass within the body keeps, by its address."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # a result that keeps itself would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a CUDA device that are free, or that torch holds for reuse."""
    reused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reused
