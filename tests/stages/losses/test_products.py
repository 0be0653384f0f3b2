"""Products of the head: bfloat16 inputs with float32 sums and results on a CUDA device, as before on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.as_on_cuda import as_on_cuda, operators_on_cuda
from torch import Tensor

from penstock._stages.losses.distributions import Distributions, entropy_of, logprobs_of
from penstock._stages.losses.products import check_backward_dtype, dtype_of_inputs, linear, sums_in_float32
from penstock.errors import InvalidConfig

TOKENS, WIDTH, VOCABULARY = 40, 32, 300

NARROW, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def head() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weights, a bias, and tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) * 2.5 / WIDTH**0.5
    bias = torch.randn(VOCABULARY, generator=generator)
    return hidden, weight, bias, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def softcapped(products: Tensor) -> Tensor:
    return torch.tanh(products / 30) * 30


def largest_of(predicted: Tensor, /, *_: Tensor) -> Tensor:
    return predicted.amax(-1)


def values_and_gradients(functions: Any, given: list[Tensor], **options: Any) -> tuple[Any, list[Tensor | None]]:
    """Return the values of functions of the distributions, and the gradients of hidden states, weight and bias."""
    hidden, weight, bias = leaves = [each.detach().requires_grad_() for each in given]
    found = Distributions(hidden, weight, bias, **options).over(functions, head()[3])
    factors = torch.linspace(-1, 1, TOKENS, dtype=found[0].dtype)
    torch.autograd.backward([(each * factors).sum() for each in found])
    return found, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("functions", [[logprobs_of, entropy_of], [logprobs_of, largest_of]], ids=["tiles", "chunks"])
@pytest.mark.parametrize("weights", [SINGLE, NARROW], ids=["float32 weights", "bfloat16 weights"])
@pytest.mark.parametrize("finish", [None, softcapped])
def test_bfloat16_products_are_summed_in_float32_on_a_cuda_device(functions: Any, weights: Any, finish: Any) -> None:
    hidden, weight, bias, _ = head()
    given = [hidden.to(NARROW), weight.to(weights), bias.to(weights)]
    rounded = [hidden.to(NARROW).to(DOUBLE), weight.to(NARROW).to(DOUBLE), given[2].to(DOUBLE)]

    with as_on_cuda() as calls:
        values, found = values_and_gradients(functions, given, finish=finish, temperature=0.7)
    expected, exact = values_and_gradients(functions, rounded, finish=finish, temperature=0.7)

    assert calls["mm.dtype"]
    assert calls["addmm.dtype"]
    for value, each in zip(values, expected, strict=True):
        assert value.dtype == SINGLE
        torch.testing.assert_close(value.double(), each, atol=1e-5, rtol=1e-5)
    for one, other in zip(found, exact, strict=True):
        assert one is not None
        assert other is not None
        assert float((one.double() - other).norm() / other.norm()) < 4e-3


@pytest.mark.parametrize("functions", [[logprobs_of, entropy_of], [logprobs_of, largest_of]], ids=["tiles", "chunks"])
def test_without_autocast_a_cuda_device_multiplies_float32(functions: Any) -> None:
    given = list(head()[:3])

    with as_on_cuda() as calls:
        values, found = values_and_gradients(functions, given)
    expected, exact = values_and_gradients(functions, given)

    assert not calls
    assert all(torch.equal(*pair) for pair in zip(values, expected, strict=True))
    assert all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(found, exact, strict=True)
    )


def test_the_gradient_of_the_weights_is_added_to_the_one_that_is_there() -> None:
    hidden, weight, _, tokens = head()
    weight.requires_grad_()

    with as_on_cuda():
        for _ in range(2):
            found = Distributions(hidden.to(NARROW), weight, adds_to_grad=True).logprobs_of(tokens)
            torch.autograd.backward(found.sum())
        twice, weight.grad = weight.grad, None
        torch.autograd.backward(Distributions(hidden.to(NARROW), weight).logprobs_of(tokens).sum())

    assert twice is not None
    assert weight.grad is not None
    assert twice.dtype == SINGLE
    torch.testing.assert_close(twice, 2 * weight.grad, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("weights", [SINGLE, NARROW])
def test_logits_of_a_sampler_are_float32_on_a_cuda_device(weights: torch.dtype) -> None:
    hidden, weight, bias, _ = head()
    states, matrix = hidden.to(NARROW)[None].requires_grad_(), weight.to(weights).requires_grad_()

    with as_on_cuda() as calls:
        logits = linear(states, matrix, bias)
        torch.autograd.backward(logits.square().sum())
    exact = hidden.to(NARROW).double() @ weight.detach().to(NARROW).double().T + bias.double()

    assert calls == {"mm.dtype": 3}
    assert (logits.shape, logits.dtype) == ((1, TOKENS, VOCABULARY), SINGLE)
    torch.testing.assert_close(logits[0].double(), exact, atol=1e-5, rtol=1e-5)
    assert states.grad is not None
    assert matrix.grad is not None
    of_weight = 2 * exact.T @ hidden.to(NARROW).double()
    assert float((matrix.grad.double() - of_weight).norm() / of_weight.norm()) < 5e-3


@pytest.mark.parametrize(
    ("on_cuda", "weights", "autocast", "inputs"),
    [
        (False, SINGLE, None, SINGLE),
        (False, SINGLE, NARROW, SINGLE),
        (False, NARROW, NARROW, NARROW),
        (True, SINGLE, None, SINGLE),
        (True, SINGLE, NARROW, NARROW),
        (True, SINGLE, torch.float16, SINGLE),
        (True, NARROW, None, NARROW),
        (True, DOUBLE, NARROW, DOUBLE),
    ],
)
def test_the_dtype_of_the_inputs_follows_from_device_weights_and_autocast(
    *, on_cuda: bool, weights: torch.dtype, autocast: torch.dtype | None, inputs: torch.dtype
) -> None:
    weight = torch.empty(2, 2, dtype=weights)

    if on_cuda:
        with as_on_cuda():
            assert dtype_of_inputs(weight, autocast) == inputs
    else:
        assert dtype_of_inputs(weight, autocast) == inputs


def test_a_cpu_sums_in_the_dtype_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not sums_in_float32("cpu")
    assert sums_in_float32("cuda")
    for name, value in (("penstock._stages.losses.products.VERSION", (2, 10)), ("torch.version.hip", "6.4")):
        with monkeypatch.context() as changed:
            changed.setattr(name, value)
            assert not sums_in_float32("cuda")


def test_the_error_of_the_ratio_is_that_of_rounded_inputs_and_less_than_half_of_that_of_rounded_logits() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(512, 256, generator=generator)
    weight = torch.randn(4096, 256, generator=generator) * 4 / 256**0.5
    tokens = (hidden @ weight.T).argmax(-1)

    def error_of(logprobs: Tensor) -> float:
        return float(((logprobs.double() - exact).exp() - 1).abs().mean())

    exact = Distributions(hidden.double(), weight.double()).logprobs_of(tokens)
    with as_on_cuda():
        inputs = Distributions(hidden.to(NARROW), weight).logprobs_of(tokens)
    logits = (hidden.to(NARROW) @ weight.to(NARROW).T).float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    assert error_of(Distributions(hidden, weight).logprobs_of(tokens)) < 1e-5
    assert error_of(inputs) < 0.01
    assert error_of(inputs) < 0.5 * error_of(logits)


@pytest.mark.parametrize(
    ("inputs", "weights", "operator"),
    [(NARROW, SINGLE, "aten.mm.dtype"), (NARROW, NARROW, "aten.mm.dtype"), (SINGLE, SINGLE, "aten.mm.default")],
    ids=["autocast", "bfloat16", "float32"],
)
def test_a_cuda_device_is_given_torchs_own_operator(inputs: Any, weights: Any, operator: str) -> None:
    with operators_on_cuda() as operators:
        hidden = torch.empty(TOKENS, WIDTH, dtype=inputs, device="cuda")
        weight = torch.empty(VOCABULARY, WIDTH, dtype=weights, device="cuda")
        logits = linear(hidden, weight, None)

    assert {name for name in operators if name.startswith("aten.mm")} == {operator}
    assert logits.dtype == SINGLE


# -- the backward pass in bfloat16 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("functions", [[logprobs_of, entropy_of], [logprobs_of, largest_of]], ids=["tiles", "chunks"])
@pytest.mark.parametrize("weights", [SINGLE, DOUBLE, NARROW])
@pytest.mark.parametrize("finish", [None, softcapped])
def test_a_backward_pass_in_bfloat16_leaves_values_and_rounds_gradients(
    monkeypatch: pytest.MonkeyPatch, functions: Any, weights: Any, finish: Any
) -> None:
    monkeypatch.setattr("penstock._stages.losses.tiles.NUMBERS_OF_A_TILE", 64 * TOKENS)  # five tiles
    monkeypatch.setattr("penstock._stages.losses.distributions.NUMBERS_AT_ONCE", 10 * VOCABULARY)  # four chunks
    given = [each.to(weights) for each in head()[:3]]
    options = {"finish": finish, "temperature": 0.7}

    values, found = values_and_gradients(functions, given, backward_dtype=NARROW, **options)
    expected, exact = values_and_gradients(functions, given, **options)

    assert all(torch.equal(*pair) for pair in zip(values, expected, strict=True))
    for one, other in zip(found, exact, strict=True):
        assert one is not None
        assert other is not None
        assert one.dtype == other.dtype == weights
        assert float((one - other).norm() / other.norm()) < 4e-3
    assert torch.equal(found[0], exact[0]) == (weights == NARROW)  # type: ignore[arg-type]  # else it was not rounded


def test_gradients_in_bfloat16_are_added_to_those_before() -> None:
    hidden, weight, _, tokens = head()
    weight.requires_grad_()

    for adds_to_grad in (True, False):
        found = Distributions(hidden, weight, adds_to_grad=adds_to_grad, backward_dtype=NARROW).logprobs_of(tokens)
        torch.autograd.backward(found.sum())
    twice, weight.grad = weight.grad, None
    torch.autograd.backward(Distributions(hidden, weight, backward_dtype=NARROW).logprobs_of(tokens).sum())

    assert twice is not None
    assert weight.grad is not None
    assert twice.dtype == SINGLE
    assert torch.equal(twice, 2 * weight.grad)


def test_gradients_of_logits_are_those_of_their_dtype() -> None:
    hidden, weight, _, tokens = head()
    found = []
    for dtype in (NARROW, None):
        logits = (hidden @ weight.T).requires_grad_()
        torch.autograd.backward(Distributions(logits, backward_dtype=dtype).logprobs_of(tokens).sum())
        found.append(logits.grad)

    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    ("dtype", "kind", "instructions", "message"),
    [
        (None, "cpu", (), None),
        (None, "mps", (), None),
        (NARROW, "cpu", ("avx512_bf16",), None),
        (NARROW, "cpu", ("amx_tile",), None),
        (NARROW, "cuda", (), None),
        (NARROW, "cpu", (), r"a processor with instructions for bfloat16 .* got cpu without: leave the dtype out"),
        (NARROW, "mps", ("avx512_bf16",), "got mps without"),
        (torch.float16, "cuda", ("avx512_bf16",), "expected torch.bfloat16, or None .* got torch.float16"),
        (SINGLE, "cpu", ("avx512_bf16",), "got torch.float32"),
    ],
)
def test_a_backward_pass_in_bfloat16_needs_instructions_for_it(
    *, monkeypatch: pytest.MonkeyPatch, dtype: Any, kind: str, instructions: tuple[str, ...], message: str | None
) -> None:
    for name in ("avx512_bf16", "amx_tile"):
        monkeypatch.setattr(f"torch.cpu._is_{name}_supported", lambda name=name: name in instructions)

    with nullcontext() if message is None else pytest.raises(InvalidConfig, match=f"key: .*{message}"):
        check_backward_dtype("key", dtype, torch.device(kind))
