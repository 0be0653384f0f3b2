"""Every way to compute a model's log-probabilities and gradients, beside float32 on a CPU, for any device.

The suite calls these on a CPU, `make test-gpu` on a GPU, where other kernels compute.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tests.models_hf.packed import logits_of_transformers, packed_rows
from torch import Tensor

from penstock import TrainBatch
from penstock._stages.losses.distributions import Distributions, entropy_of, logprobs_of
from penstock.models import HFModel, LoRA
from penstock.testing import batch
from penstock.torch import Attention, TorchTrainer

ROWS = [[torch.arange(n) * 7 % 300 for n in (30,)], [torch.arange(n) * 5 % 300 for n in (18, 10)]]
"""Two rows of one and two sequences of tokens."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.004}
"""Largest distance to float32 on a CPU, as a share of the norm."""

Around = Callable[[], AbstractContextManager[object]]


def far(found: Tensor, exact: Tensor) -> float:
    """Return the distance, as a share of the norm of the second."""
    return float((found.cpu().double() - exact.double()).norm() / exact.double().norm())


def check_head(device: torch.device | str, dtype: torch.dtype) -> None:
    """Check log-probabilities, entropies and gradients of a head with inputs of `dtype`, sums in float32."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(50, 64, generator=generator), torch.randn(3000, 64, generator=generator) / 4
    tokens = torch.randint(3000, (50,), generator=generator)

    def computed(states: Tensor, matrix: Tensor) -> list[Tensor]:
        leaves = states, matrix = states.detach().requires_grad_(), matrix.detach().requires_grad_()
        logprobs, entropy = Distributions(states, matrix).over([logprobs_of, entropy_of], tokens.to(states.device))
        torch.autograd.backward((logprobs - 0.1 * entropy).mean())
        return [logprobs.detach(), entropy.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    rounded = [each.to(dtype).double() for each in (hidden, weight)]
    found = computed(hidden.to(device, dtype), weight.to(device))
    exact = computed(rounded[0], rounded[1] if dtype != torch.float32 else weight.double())

    assert len(found) == 4
    assert [each.dtype for each in found[:2]] == [torch.float32] * 2
    for name, one, other in zip(("logprobs", "entropy", "hidden", "weight"), found, exact, strict=True):
        assert far(one, other) < (4e-3 if dtype == torch.bfloat16 else 1e-5), name


def check_packed_rows(
    folder: Path, device: torch.device | str, dtype: torch.dtype, plain: Around = nullcontext
) -> None:
    """Check logits of packed rows: beside each sequence alone in transformers, each row alone, and within `plain`."""
    model = HFModel.from_pretrained(folder).to(device)
    tokens, positions, attend = packed_rows(*ROWS)
    exact = torch.cat([logits_of_transformers(folder, sequence) for row in ROWS for sequence in row])

    def logits(ids: Tensor, places: Tensor, sight: Attention) -> Tensor:
        starts = None if sight.cu_seqlens is None else sight.cu_seqlens.to(device)
        there = sight._replace(sequences=sight.sequences.to(device), cu_seqlens=starts)
        narrow = torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32)
        with torch.no_grad(), narrow:
            found = model(ids.to(device), positions=places.to(device), attend=there)
        assert found.dtype == torch.float32
        kept: Tensor = found[there.sequences >= 0]
        return kept.cpu()

    packed = logits(tokens, positions, attend)
    alone = torch.cat([logits(*packed_rows([sequence])) for row in ROWS for sequence in row])
    with plain():
        masked = logits(tokens, positions, attend)

    for name, found in {"packed": packed, "alone": alone, "masked": masked}.items():
        assert far(found, exact) < TOLERANCE[dtype], name


WAYS: dict[str, tuple[float, dict[str, Any], dict[str, Any]]] = {
    "float32": (1e-3, {}, {}),
    "one sequence a row": (1e-3, {}, {"micro_batch_tokens": 1}),
    "computed again": (1e-3, {"gradient_checkpointing": True}, {}),
    "bfloat16": (0.05, {}, {"autocast": torch.bfloat16}),
    "float16": (0.02, {}, {"autocast": torch.float16}),
    "bfloat16, adapters on a base in bfloat16": (0.1, {"base": torch.bfloat16}, {"autocast": torch.bfloat16}),
    "float32, adapters": (1e-3, {"base": torch.float32}, {}),
}
"""Bounds on the distance of gradients to float32 on a CPU, options of the model, and of the trainer."""


def check_gradients(folder: Path, device: torch.device | str, way: str, **options: Any) -> None:
    """Check the gradients of a step in a way of `WAYS`, with further options of the trainer."""
    bound, of_model, of_trainer = WAYS[way]
    base = of_model.get("base")
    made = partial(_model, folder, adapted=base is not None)

    exact = _gradients(made(device="cpu"))
    given = {name: value for name, value in of_model.items() if name != "base"}
    found = _gradients(made(device=device, dtype=base, **given), **of_trainer, **options)

    assert far(found, exact) < bound


def _model(folder: Path, *, adapted: bool, dtype: torch.dtype | None = None, **options: Any) -> HFModel:
    """Return the model, with random adapters if `adapted`: at their beginning half of them have no gradient."""
    lora = LoRA(rank=4) if adapted else None
    model = HFModel.from_pretrained(folder, dtype=dtype, lora=lora, **options)
    if adapted:
        generator = torch.Generator().manual_seed(1)
        tensors = model.state_dict()
        model.load_state_dict(
            {name: 0.05 * torch.randn(each.shape, generator=generator) for name, each in tensors.items()}
        )
    return model


def _batch() -> TrainBatch:
    """Return a group of six sequences."""
    lengths = [3, 17, 9, 12, 5, 17]
    advantages = np.linspace(-1, 1, sum(lengths) + 4 * len(lengths))
    packed = batch(groups=1, completion_lengths=lengths, prompt_length=4, advantages=advantages)
    return msgspec.structs.replace(packed, tokens=packed.tokens % 300)


def _gradients(model: HFModel, **options: Any) -> Tensor:
    """Return the gradients of all tensors that train, as a step of gradient descent changes them."""
    before = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    descent = partial(torch.optim.SGD, lr=1.0)
    metrics = TorchTrainer(model, optimizer=descent, max_grad_norm=None, **options).step(_batch())
    assert np.isfinite(metrics["loss"])
    return torch.cat([(before[name] - each.detach().cpu()).flatten() for name, each in model.state_dict().items()])
