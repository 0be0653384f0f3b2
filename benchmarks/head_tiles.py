"""Seconds of the head on a GPU, both ways, by the size of its tiles: `python -m benchmarks.head_tiles`."""

from __future__ import annotations

import time
from itertools import product
from unittest.mock import patch

import torch

from penstock._stages.losses.distributions import Distributions, entropy_of, logprobs_of

from .shapes import SHAPES

__all__ = ["main"]

TOKENS = 8192


def seconds(dtype: torch.dtype, width: int, vocabulary: int) -> float:
    """Return the seconds of a forward and backward pass, the best of three."""
    hidden = torch.randn(TOKENS, width, device="cuda", dtype=dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, device="cuda") * 2.5 / width**0.5).requires_grad_()
    tokens = torch.randint(vocabulary, (TOKENS,), device="cuda")
    best = float("inf")
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        found = Distributions(hidden, weight, adds_to_grad=True).over([logprobs_of, entropy_of], tokens)
        torch.autograd.backward([each.sum() for each in found])
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    """Print a line for each shape, dtype and size of tiles."""
    print(torch.cuda.get_device_name(), torch.__version__)
    for name, shape in SHAPES.items():
        width, vocabulary = shape["hidden_size"], shape["vocab_size"]
        flops = 2 * 4 * TOKENS * width * vocabulary
        print(name, f"float32 as it was: {seconds(torch.float32, width, vocabulary):.4f} s", flush=True)
        for numbers, rows in product((2**24, 2**26, 2**28), (1024, 4096)):
            with (
                patch("penstock._stages.losses.tiles.NUMBERS_OF_A_TILE", numbers // 32),
                patch("penstock._stages.losses.tiles.TOKENS_ON_A_DEVICE", rows),
            ):
                torch.cuda.reset_peak_memory_stats()
                took = seconds(torch.bfloat16, width, vocabulary)
            most = torch.cuda.max_memory_allocated() / 1e9
            size = f"{name} 2**{numbers.bit_length() - 1} rows {rows}"
            print(f"{size}: {took:.4f} s {flops / took / 1e12:.0f} TFLOP/s {most:.1f} GB", flush=True)


if __name__ == "__main__":
    main()
