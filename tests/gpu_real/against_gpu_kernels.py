"""The kernels of a CUDA device compute what a CPU computes in float32: `make test-gpu`.

Models are small and have random weights, whose logits are as far apart as those of a trained one. `pytest -s` shows the
errors of log-probabilities and ratios, and the kernels that took most of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from benchmarks.training import without_kernels
from tests.as_on_cuda import Operators
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from penstock import TrainBatch, TrajectoryGroup, Worker
from penstock._stages.losses.distributions import Distributions, entropy_of, logprobs_of
from penstock._stages.losses.products import dtype_of_inputs
from penstock._stages.models.micro_batches import micro_batches
from penstock._stages.models.scoring import read_distributions
from penstock._stages.training.activation_memory import bytes_of_a_token
from penstock.losses import KL, AdvantageWeighted
from penstock.models import HFModel, LoRA
from penstock.policies import Completion, SamplingParams
from penstock.torch import TorchPolicy, TorchTrainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

VOCABULARY, GROUP, LONGEST = 8192, 4, 200

VARLEN, BACKWARDS = "torch_attn._varlen_attn.default", "torch_attn._varlen_attn_backward.default"

Head = tuple[Tensor, Tensor, Tensor]

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.manual_seed(0)
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), width_of_a_head=64)


def make_folder(folder: Path, *, width_of_a_head: int, **options: Any) -> Path:
    """Write a Qwen2 of two layers with grouped queries, whose logits have a deviation of about 2.5."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 (takes seconds to import)

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width_of_a_head,
        tie_word_embeddings=False,
        initializer_range=0.06,
        **options,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=2.5 / 256**0.5)
    model.save_pretrained(folder)
    return folder


def batch(logprobs: Tensor | None = None, groups: int = 6) -> TrainBatch:
    """Return sequences of many lengths, all tokens of which train but the first.

    Args:
        logprobs: [N] of the tokens under the model; those of the policy that sampled them, and of the reference, are
            near them. None for any.
        groups: number of groups.
    """
    made = [_tokens(number) for number in range(groups)]
    ends = np.cumsum([len(tokens) for tokens, _ in made])
    given = np.zeros(ends[-1]) if logprobs is None else logprobs.double().numpy()
    parts = np.split(given, ends[:-1])
    return TrainBatch.pack(
        [_group(number, *one, part) for number, (one, part) in enumerate(zip(made, parts, strict=True))]
    )


def _tokens(number: int) -> tuple[Array, Array]:
    """Return the tokens of a group, and the starts of its sequences."""
    generator = np.random.default_rng(number)
    lengths = generator.integers(2, LONGEST + 1, GROUP)
    return generator.integers(VOCABULARY, size=int(lengths.sum())), np.append(0, lengths.cumsum())


def _group(number: int, tokens: Array, offsets: Array, logprobs: Array) -> TrajectoryGroup:
    generator = np.random.default_rng([1, number])
    return TrajectoryGroup.build(
        env="cuda",
        instance_id=str(number),
        tokens=tokens,
        offsets=offsets,
        loss_mask=~np.isin(np.arange(len(tokens)), offsets),
        rewards=generator.normal(size=GROUP),
        behavior_logprobs=logprobs + generator.normal(0, 0.1, size=len(tokens)),
        ref_logprobs=logprobs + generator.normal(0, 0.1, size=len(tokens)),
        advantages=generator.normal(size=len(tokens)),
    )


def scored(model: HFModel, given: TrainBatch, tokens: int | None, autocast: torch.dtype | None = None) -> Tensor:
    """Return [N] log-probabilities of the tokens that train, 0 elsewhere, on the host."""
    device = next(model.parameters()).device
    found = torch.zeros(len(given.tokens))
    for part in micro_batches(given, {"place": np.arange(len(given.tokens))}, tokens, device):
        use = partial(_logprobs, part.targets)
        with torch.no_grad():
            logprobs = read_distributions(model, part, use, passes_hidden=True, autocast=autocast)
        found[part.columns["place"].cpu()] = logprobs.float().cpu()
    return found


def _logprobs(targets: Tensor, distributions: Distributions) -> Tensor:
    return distributions.logprobs_of(targets)


def trained(model: HFModel, given: TrainBatch, **options: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the metrics of a step of plain gradient descent, and how it changed each tensor: the gradient."""
    before = {name: tensor.float().cpu().clone() for name, tensor in model.state_dict().items()}
    loss = AdvantageWeighted() + 0.1 * KL()  # without bounds, which rounding would cross for some tokens
    descent = partial(torch.optim.SGD, lr=1.0)
    metrics = TorchTrainer(model, optimizer=descent, loss=loss, max_grad_norm=None, **options).step(given)
    return metrics, {name: before[name] - tensor.float().cpu() for name, tensor in model.state_dict().items()}


def far(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of a tensor's gradients, as a share of the norm of the second."""
    return max(float((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-12)) for name in other)


def operators_of(work: Callable[[], object]) -> set[str]:
    """Return the names of the operators of `work`."""
    operators = Operators()
    with operators:
        work()
    return operators.names


def kernels_of(work: Callable[[], object]) -> list[tuple[str, float]]:
    """Return the kernels of `work` on the device with their milliseconds, the longest first."""
    work()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    events = profiled.key_averages()
    on_device = [(event.key, event.self_device_time_total / 1000) for event in events if event.self_device_time_total]
    return sorted(on_device, key=lambda pair: -pair[1])


# -- attention of packed rows ------------------------------------------------------------------------------------------


def test_packed_rows_in_bfloat16_are_computed_by_the_kernel_for_sequences_of_different_lengths(folder: Path) -> None:
    model = HFModel.from_pretrained(folder, device=CUDA)
    trainer = TorchTrainer(model, optimizer=partial(torch.optim.SGD, lr=0.0), autocast=torch.bfloat16)
    given = batch()

    operators, kernels = operators_of(lambda: trainer.step(given)), kernels_of(lambda: trainer.step(given))

    print("\n".join(f"{milliseconds:8.3f} ms {name[:110]}" for name, milliseconds in kernels[:10]))
    assert {VARLEN, BACKWARDS} <= operators
    assert any("flash" in name for name, _ in kernels)
    assert not any("fmha" in name for name, _ in kernels)
    assert not any("sgemm" in name for name, _ in kernels)


def test_in_float32_and_without_packing_the_kernel_is_left_alone(folder: Path) -> None:
    model = HFModel.from_pretrained(folder, device=CUDA)

    in_float32 = operators_of(lambda: scored(model, batch(), None))
    alone = operators_of(lambda: scored(model, batch(), 1, torch.bfloat16))

    assert VARLEN not in in_float32 | alone


@pytest.mark.parametrize("width", [16, 64, 256])
def test_log_probabilities_of_packed_rows_are_those_of_float32_and_of_rows_of_one_sequence(
    tmp_path: Path, width: int
) -> None:
    made, given = make_folder(tmp_path, width_of_a_head=width), batch()
    exact = scored(HFModel.from_pretrained(made), given, None)
    model = HFModel.from_pretrained(made, device=CUDA)

    operators = operators_of(lambda: scored(model, given, None, torch.bfloat16))
    packed, alone = (scored(model, given, tokens, torch.bfloat16) for tokens in (None, 1))
    with without_kernels():
        plain = scored(model, given, None, torch.bfloat16)

    errors = [float((each - exact).abs().max()) for each in (packed, alone, plain)]
    means = [float((each - exact).abs().mean()) for each in (packed, alone, plain)]
    print(f"head of {width}: log-probabilities, largest and mean error: packed, one a row, plain: {errors} {means}")
    assert VARLEN in operators
    assert errors[0] < 0.2
    assert means[0] < 1.5 * means[1] + 1e-4
    torch.testing.assert_close(scored(model, given, None), exact, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("width", "options"), [(12, {}), (64, {"attention_dropout": 0.1})], ids=["width", "dropout"])
def test_what_the_kernel_does_not_compute_keeps_the_mask(tmp_path: Path, width: int, options: dict[str, Any]) -> None:
    made, given = make_folder(tmp_path, width_of_a_head=width, **options), batch()
    model = HFModel.from_pretrained(made, device=CUDA)
    exact = scored(HFModel.from_pretrained(made), given, None)

    trainer = TorchTrainer(model, optimizer=partial(torch.optim.SGD, lr=0.0), autocast=torch.bfloat16)
    trainer.step(given)  # tries the packing of the model, without its dropout
    operators = operators_of(lambda: trainer.step(given))

    assert VARLEN not in operators
    model.eval()
    assert float((scored(model, given, None, torch.bfloat16) - exact).abs().mean()) < 0.05


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
def test_gradients_of_packed_rows_in_bfloat16_are_nearly_those_of_float32_on_a_cpu(
    folder: Path, *, checkpointing: bool
) -> None:
    made = partial(HFModel.from_pretrained, folder)
    given = batch(scored(made(), batch(), None))

    expected, exact = trained(made(), given)
    on_cuda, same = trained(made(device=CUDA), given)
    packed, narrow = trained(made(device=CUDA, gradient_checkpointing=checkpointing), given, autocast=torch.bfloat16)
    _, alone = trained(made(device=CUDA), given, autocast=torch.bfloat16, micro_batch_tokens=1)

    print(f"gradients: float32 {far(same, exact):.2e}, packed {far(narrow, exact):.2e}, alone {far(alone, exact):.2e}")
    assert on_cuda["loss"] == pytest.approx(expected["loss"], abs=1e-3)
    assert far(same, exact) < 2e-3
    assert packed["loss"] == pytest.approx(expected["loss"], abs=0.02)
    assert far(narrow, exact) < 1.5 * far(alone, exact)


def test_adapters_beside_a_base_in_bfloat16_have_nearly_the_gradients_of_float32(folder: Path) -> None:
    given = batch(scored(HFModel.from_pretrained(folder), batch(), None))

    def made(dtype: torch.dtype, device: torch.device) -> HFModel:
        torch.manual_seed(1)
        model = HFModel.from_pretrained(folder, lora=LoRA(rank=4), dtype=dtype, device=device)
        model.load_state_dict({name: 0.02 * torch.randn(each.shape) for name, each in model.state_dict().items()})
        return model

    _, exact = trained(made(torch.float32, CPU), given)
    _, narrow = trained(made(torch.bfloat16, CUDA), given, autocast=torch.bfloat16)

    print(f"gradients of adapters: {far(narrow, exact):.2e}")
    assert far(narrow, exact) < 0.2


# -- the ratio between sampler and trainer -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "autocast"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float32, None)],
    ids=["bfloat16", "float32 with autocast", "float32"],
)
def test_samples_of_a_model_in_bfloat16_have_nearly_the_log_probabilities_of_the_trainer(
    folder: Path, weights: torch.dtype, autocast: torch.dtype | None
) -> None:
    make = partial(HFModel.from_pretrained, folder, dtype=weights, device=CUDA)
    policy = TorchPolicy(make, eos_id=VOCABULARY - 1, autocast=autocast)
    prompts = [np.arange(8, dtype=np.int32) + row for row in range(64)]

    async def sampled() -> list[Completion]:
        async with policy.open(Worker()) as engine:
            return await engine.generate(prompts, SamplingParams(max_completion_tokens=100))

    completions = anyio.run(sampled)
    given = sampled_batch(prompts, completions)
    model = HFModel.from_pretrained(folder, device=CUDA)
    logprobs = scored(model, given, None, torch.bfloat16)
    trains = torch.tensor(given.loss_mask)
    errors = (logprobs - torch.tensor(given.behavior_logprobs))[trains].abs().sort().values

    mean, p99, most = errors.mean(), errors[int(0.99 * len(errors))], errors[-1]
    print(f"sampler in {weights}, autocast {autocast}: |log ratio| mean {mean:.2e} p99 {p99:.2e} max {most:.2e}")
    assert float(mean) < 0.03


def sampled_batch(prompts: list[Array], completions: list[Completion]) -> TrainBatch:
    """Return a group of each prompt and its completion."""
    groups = []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        assert completion.logprobs is not None
        total = len(prompt) + len(completion.tokens)
        trains = np.arange(total) >= len(prompt)
        logprobs = np.zeros(total, np.float32)
        logprobs[trains] = completion.logprobs
        groups.append(
            TrajectoryGroup.build(
                env="cuda",
                instance_id=str(number),
                tokens=np.concatenate([prompt, completion.tokens]),
                offsets=np.array([0, total]),
                loss_mask=trains,
                rewards=np.zeros(1),
                behavior_logprobs=logprobs,
                advantages=np.ones(total),
            )
        )
    return TrainBatch.pack(groups)


def test_no_pass_of_a_sampler_waits_for_a_plan_of_cudnn(folder: Path) -> None:
    policy = TorchPolicy(partial(HFModel.from_pretrained, folder, dtype=torch.bfloat16, device=CUDA), eos_id=0)
    prompts = [np.arange(1, 4 + row % 5, dtype=np.int32) for row in range(16)]

    async def sampled() -> None:
        async with policy.open(Worker()) as engine:
            await engine.generate(prompts, SamplingParams(max_completion_tokens=20))

    operators = operators_of(lambda: anyio.run(sampled))

    assert not any("cudnn" in name for name in operators)


# -- micro-batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
def test_the_memory_of_a_micro_batch_is_the_one_that_was_estimated(folder: Path, *, checkpointing: bool) -> None:
    model = HFModel.from_pretrained(folder, device=CUDA, gradient_checkpointing=checkpointing)
    given, most = batch(groups=40), {}

    trainer = TorchTrainer(model, optimizer=partial(torch.optim.SGD, lr=0.0), autocast=torch.bfloat16)
    model.train()  # else activations are kept
    estimated = bytes_of_a_token(partial(trainer._forward_of, given), LONGEST)
    for tokens in (4096, 12_288):
        trainer = TorchTrainer(
            model, optimizer=partial(torch.optim.SGD, lr=0.0), autocast=torch.bfloat16, micro_batch_tokens=tokens
        )
        trainer.step(given)
        torch.cuda.reset_peak_memory_stats()
        trainer.step(given)
        most[tokens] = torch.cuda.max_memory_allocated()

    measured = (most[12_288] - most[4096]) / 8192
    print(f"bytes of a token: estimated {estimated:.0f}, of the peak of a step {measured:.0f}")
    assert measured < 1.2 * estimated + 60_000


def test_micro_batches_are_large_on_a_device_with_memory(folder: Path) -> None:
    trainer = TorchTrainer(HFModel.from_pretrained(folder, device=CUDA), optimizer=partial(torch.optim.SGD, lr=0.0))

    trainer.step(batch())

    assert trainer._micro_batch_tokens == 16_384


# -- head --------------------------------------------------------------------------------------------------------------


def head(tokens: int = 700, width: int = 896, vocabulary: int = 50_000) -> Head:
    """Return hidden states, weights with logits of a deviation of 2.5, and tokens, on the device."""
    hidden = torch.randn(tokens, width, device=CUDA)
    weight = torch.randn(vocabulary, width, device=CUDA) * 2.5 / width**0.5
    return hidden, weight, torch.randint(vocabulary, (tokens,), device=CUDA)


def softcapped(products: Tensor) -> Tensor:
    return torch.tanh(products / 30) * 30


def largest_of(predicted: Tensor, /, *_: Tensor) -> Tensor:
    return predicted.amax(-1)


@pytest.mark.parametrize("functions", [[logprobs_of, entropy_of], [logprobs_of, largest_of]], ids=["tiles", "chunks"])
@pytest.mark.parametrize("narrow", [False, True], ids=["weights in float32", "weights in bfloat16"])
@pytest.mark.parametrize("finish", [None, softcapped])
def test_products_of_bfloat16_are_summed_in_float32(functions: Any, finish: Any, *, narrow: bool) -> None:
    hidden, weight, tokens = head()
    rounded = [each.bfloat16().double() for each in (hidden, weight)]
    bias = torch.randn(len(weight), device=CUDA)
    if narrow:
        weight, bias = weight.bfloat16(), bias.bfloat16()
    tempers = torch.linspace(0.5, 1.5, len(hidden), device=CUDA)[:, None]

    def gradients(*given: Tensor) -> tuple[Any, Any]:
        states, matrix, added, temperature = leaves = [each.detach().requires_grad_() for each in given]
        distributions = Distributions(states, matrix, added, finish, temperature.detach())
        found = distributions.over(functions, tokens)
        weights = torch.linspace(-1, 1, len(tokens), device=CUDA).to(found[0].dtype)
        torch.autograd.backward([(each * weights).sum() for each in found])
        return found, [leaf.grad for leaf in leaves[:3]]

    values, found = gradients(hidden.bfloat16(), weight, bias, tempers)
    expected, exact = gradients(rounded[0], rounded[1], bias.double(), tempers.double())

    for value, each in zip(values, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), each, atol=2e-4, rtol=1e-5)
    for one, other in zip(found, exact, strict=True):
        assert one is not None
        assert float((one.double() - other).norm() / other.norm()) < 4e-3


def test_the_gradient_of_the_weights_is_added_to_the_one_that_is_there() -> None:
    hidden, weight, tokens = head()
    weight.requires_grad_()

    for _ in range(2):
        torch.autograd.backward(Distributions(hidden.bfloat16(), weight, adds_to_grad=True).logprobs_of(tokens).sum())
    twice = weight.grad
    weight.grad = None
    torch.autograd.backward(Distributions(hidden.bfloat16(), weight).logprobs_of(tokens).sum())

    assert twice is not None
    assert weight.grad is not None
    assert float((twice - 2 * weight.grad).norm() / twice.norm()) < 1e-3


def test_the_head_multiplies_in_bfloat16_and_no_product_is_in_float32() -> None:
    hidden, weight, tokens = head()
    weight.requires_grad_()
    assert dtype_of_inputs(weight, torch.bfloat16) == torch.bfloat16
    assert dtype_of_inputs(weight, None) == torch.float32

    def work(dtype: torch.dtype) -> None:
        states = hidden.to(dtype).requires_grad_()
        logprobs, entropy = Distributions(states, weight, adds_to_grad=True).over([logprobs_of, entropy_of], tokens)
        torch.autograd.backward(logprobs.sum() + entropy.sum())

    for dtype in (torch.float32, torch.bfloat16):
        kernels = kernels_of(partial(work, dtype))
        print(dtype, *(f"\n{milliseconds:8.3f} ms {name[:110]}" for name, milliseconds in kernels[:12]))
        products = [name for name, _ in kernels if "gemm" in name or "nvjet" in name]
        assert any("sgemm" in name or "f32f32_f32f32" in name for name in products) == (dtype == torch.float32)


@pytest.mark.parametrize(("width", "vocabulary"), [(896, 151_936), (1536, 151_936), (3584, 152_064)])
def test_the_error_of_the_ratio_of_rounded_inputs_is_below_percents(width: int, vocabulary: int) -> None:
    hidden, weight, _ = head(1024, width, vocabulary)
    likely = torch.multinomial((hidden @ weight.T).softmax(-1), 1)[:, 0]

    def of(dtype: torch.dtype) -> Tensor:
        return Distributions(hidden.to(dtype), weight).logprobs_of(likely)

    exact = of(torch.float32)
    inputs = (of(torch.bfloat16) - exact).exp() - 1
    logits = (hidden.bfloat16() @ weight.bfloat16().T).float().log_softmax(-1).gather(1, likely[:, None])[:, 0]
    rounded = (logits - exact).exp() - 1
    for name, each in (("inputs", inputs), ("logits too", rounded)):
        sizes = each.abs().sort().values
        found = f"mean {sizes.mean():.2e} p99 {sizes[-11]:.2e} max {sizes[-1]:.2e}"
        print(f"V {vocabulary} D {width}: error of the ratio with rounded {name}: {found}")
    assert float(inputs.abs().mean()) < 0.01
    assert float(inputs.abs().mean()) < 0.75 * float(rounded.abs().mean())
