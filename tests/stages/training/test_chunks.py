"""The head is computed where a token trains, by chunks: the numbers are those of whole logits, in little memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.cells import cells
from tests.stages.training.no_tensor_of import NoTensorOf
from tests.tiny_model import ReadModel, TinyModel
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import TrainBatch
from penstock._stages.losses import distributions, tiles
from penstock._stages.losses.distributions import Distributions, entropy_of, logprobs_of
from penstock.losses import (
    CISPO,
    GSPO,
    KL,
    AdvantageWeighted,
    Distillation,
    Entropy,
    ImportanceWeight,
    Loss,
    PPOClip,
    SampledDistillation,
)
from penstock.testing import batch, drive, group
from penstock.torch import TorchReference, TorchTrainer

SGD = partial(torch.optim.SGD, lr=0.1)

LOSSES: dict[str, Loss] = {
    "policy gradient": AdvantageWeighted(),
    "weighted": PPOClip(old="proximal") * ImportanceWeight(high=1.3, low=0.7, beyond="mask"),
    "sequences": GSPO(clip_low=0.1, clip_high=0.2).aggregated("seq-mean-token-mean"),
    "cispo": CISPO(highest=1.2),
    "reference and entropy": PPOClip() + 0.1 * KL("k3") - 0.05 * Entropy(),
    "sampled": SampledDistillation() + 0.1 * Entropy(),
    "raw": Distillation("reverse_kl", mode="raw"),
    "renormalised": AdvantageWeighted() + 0.5 * Distillation("jsd", mode="renormalised", beta=0.3),
    "tail": Distillation("forward_kl", mode="tail") - 0.1 * Entropy(),
}


def taught(*, own_temperatures: bool = False, vocabulary: int = 11) -> TrainBatch:
    """Return two groups of sequences of different lengths, with every column that a loss can need."""
    numbers = np.random.default_rng(0)
    packed = batch(groups=2, completion_lengths=[3, 9, 5], prompt_length=2)
    count, trains = len(packed.tokens), packed.loss_mask
    noise = numbers.normal(-2.4, 0.3, (2, count)).astype(np.float32) * trains
    ids = np.stack([numbers.choice(vocabulary, 4, replace=False) for _ in range(count)]).astype(np.int32)
    ids[::5, 1:] = -1
    groups = packed.groups
    if own_temperatures:
        meta = {"temperatures": [0.6, 1.0, 1.7]}
        groups = tuple(each._replace(meta=meta) for each in groups)
    return msgspec.structs.replace(
        packed,
        groups=groups,
        tokens=np.where(np.arange(count) % 2, ids[:, 0], numbers.integers(0, vocabulary, count)).astype(np.int32),
        advantages=numbers.standard_normal(count).astype(np.float32),
        behavior_logprobs=noise[0],
        teacher_ids=ids,
        teacher_logprobs=np.log(numbers.dirichlet(np.ones(5), count)[:, :4]).astype(np.float32),
    )


def stepped(
    model: Callable[[], Any], loss: Loss, given: TrainBatch, **options: Any
) -> tuple[dict[str, float], Mapping[str, Tensor]]:
    """Return the metrics of a step without clipping in float64, and the weights behind it."""
    trainer = TorchTrainer(
        model().double(),
        optimizer=SGD,
        loss=loss,
        max_grad_norm=None,
        reference=TinyModel(seed=7).double(),
        **options,
    )
    metrics = trainer.step(given)
    return {
        name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "weights/"))
    }, trainer.weights()


def use_chunks_of(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have chunks and tiles of so many numbers."""
    monkeypatch.setattr(distributions, "NUMBERS_AT_ONCE", numbers)
    monkeypatch.setattr(tiles, "NUMBERS_OF_A_TILE", numbers)
    monkeypatch.setattr(tiles, "MULTIPLE", 1)


STEPS = [
    pytest.param(
        model,
        temperature,
        micro_batch_tokens,
        id=f"{model.__name__}-{temperature or 'own'}-{'one by one' if micro_batch_tokens else 'packed'}",
        marks=[] if model is ReadModel and temperature is None else [pytest.mark.long],
    )
    for model in (TinyModel, ReadModel)
    for temperature in (1.0, 0.6, None)
    for micro_batch_tokens in (None, 1)
]
"""A step of one backward pass, and one of as many as sequences: `make test` takes one of each for each loss."""


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("model", "temperature", "micro_batch_tokens"), STEPS)
def test_chunks_of_one_token_change_neither_metrics_nor_gradients(
    name: str,
    model: Callable[[], Any],
    temperature: float | None,
    micro_batch_tokens: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = taught(own_temperatures=temperature is None)
    options = {"temperature": temperature or 1.0, "micro_batch_tokens": micro_batch_tokens}
    expected, weights = stepped(TinyModel, LOSSES[name], given, **options)

    use_chunks_of(1, monkeypatch)
    found, moved = stepped(model, LOSSES[name], given, **options)

    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for tensor in weights:
        torch.testing.assert_close(moved[tensor], weights[tensor], rtol=1e-9, atol=1e-12)


class Products(TorchFunctionMode):
    """Records the number of columns of each product."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = list[int]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function is torch.mm:
            self.columns.append(found.shape[1])
        return found


def test_tiles_have_a_multiple_of_64_columns_whatever_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "NUMBERS_OF_A_TILE", 37 * 100)
    hidden, weight = torch.randn(37, 3), torch.randn(200, 3)
    products = Products()

    with products:
        Distributions(hidden, weight, None).over([logprobs_of], torch.zeros(37, dtype=torch.int64))

    assert products.columns == [64, 64, 64, 8]


@pytest.mark.parametrize("finish", [None, lambda logits: torch.tanh(logits / 3) * 3], ids=["plain", "bounded"])
@pytest.mark.parametrize(
    "temperature", [1.0, 0.7, torch.linspace(0.5, 2, 5, dtype=torch.float64)[:, None]], ids=["1", "0.7", "own"]
)
@pytest.mark.parametrize("at_once", cells([1, 21, 2**24], run=[21]))
def test_gradients_agree_with_finite_differences(
    finish: Any, temperature: float | Tensor, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_chunks_of(at_once, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (7, 3), (7,))]
    tokens = torch.tensor([6, 0, 3, 3, 1])

    def values(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        given = Distributions(hidden, weight, bias, finish, temperature)
        return given.over([logprobs_of, entropy_of], tokens)

    assert torch.autograd.gradcheck(values, tuple(leaf.requires_grad_() for leaf in leaves))


def never_below_zero(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits < 0, -torch.inf)


@pytest.mark.parametrize("at_once", [1, 6, 2**24])
def test_tokens_that_cannot_be_drawn_change_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_chunks_of(at_once, monkeypatch)
    monkeypatch.setattr(tiles, "TOKENS_OF_A_TILE", 2)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((5, 3), (7, 3)))
    logits = never_below_zero(hidden @ weight.T)
    tokens = logits.argmax(1)
    whole = torch.log_softmax(logits.clamp(min=-1e30), dim=1)
    expected = logprobs_of(whole, tokens), entropy_of(whole)

    given = Distributions(hidden, weight, None, never_below_zero)
    found = given.over([logprobs_of, entropy_of], tokens)

    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(torch.cat(values).sum(), (hidden, weight)) for values in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_a_head_in_bfloat16_sums_the_gradients_of_its_chunks_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((512, 4), (7, 4)))
    tokens = torch.zeros(512, dtype=torch.int64)

    def gradient(at_once: int) -> Tensor:
        use_chunks_of(at_once, monkeypatch)
        leaf = weight.clone().requires_grad_()
        (found,) = torch.autograd.grad(Distributions(hidden, leaf).logprobs_of(tokens).sum(), leaf)
        return found

    torch.testing.assert_close(gradient(1), gradient(2**24), rtol=1e-2, atol=0.1)


VOCABULARY = 4001
TRAINED = 40

EVERYTHING = PPOClip() + 0.1 * KL() - 0.1 * Entropy() + Distillation() + SampledDistillation()


def in_little_memory(model: Any, reference: Any) -> TorchTrainer:
    return TorchTrainer(
        model, optimizer=SGD, loss=EVERYTHING, reference=reference, temperature=0.7, micro_batch_tokens=None
    )


def long_batch() -> TrainBatch:
    given = taught(vocabulary=VOCABULARY)
    assert given.loss_tokens < TRAINED
    return given


def test_a_step_makes_no_tensor_of_all_tokens_and_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even half of one: on the trainer, its reference and the backward pass, for all terms at a temperature."""
    use_chunks_of(4 * VOCABULARY, monkeypatch)
    given = long_batch()
    models = [ReadModel(vocabulary=VOCABULARY, width=4, seed=seed) for seed in (0, 1)]

    with NoTensorOf(given.loss_tokens * VOCABULARY // 2):
        in_little_memory(*models).step(given)


class ZerosOf(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Counts the tensors of zeros of a shape that a computation makes."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape = shape
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function.overloadpacket is torch.ops.aten.zeros_like:
            self.count += made.shape == self.shape
        return made


def test_all_micro_batches_add_to_one_gradient_of_the_head() -> None:
    model = ReadModel(vocabulary=VOCABULARY, width=4)
    trainer = TorchTrainer(model, optimizer=SGD, loss=PPOClip(), micro_batch_tokens=1)

    with ZerosOf(model.head.weight.shape) as zeros:
        trainer.step(long_batch())

    assert zeros.count == 1


@pytest.mark.parametrize("holder", ["policy", "reference"])
def test_whole_logits_do_not_pass_that_test(holder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_chunks_of(4 * VOCABULARY, monkeypatch)
    given = long_batch()
    kinds = (TinyModel, ReadModel) if holder == "policy" else (ReadModel, TinyModel)
    models = [kind(vocabulary=VOCABULARY, width=4) for kind in kinds]

    with NoTensorOf(given.loss_tokens * VOCABULARY // 2), pytest.raises(MemoryError):
        in_little_memory(*models).step(given)


async def test_a_reference_scores_by_chunks_as_with_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = group(completion_lengths=[3, 9, 5])
    groups = [msgspec.structs.replace(made, tokens=made.tokens % 11)]
    (whole,) = await drive(TorchReference(TinyModel), groups)

    use_chunks_of(1, monkeypatch)
    (chunked,) = await drive(TorchReference(ReadModel), groups)

    assert chunked.ref_logprobs == pytest.approx(whole.ref_logprobs, rel=1e-5)
