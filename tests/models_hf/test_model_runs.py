"""An HFModel in a trainer, its checkpoints, and its samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from anyio import to_thread
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from penstock import TrainBatch, Worker
from penstock.errors import InvalidConfig
from penstock.models import HFModel, export
from penstock.policies import PretrainedTokenizer, SamplingParams
from penstock.testing import batch
from penstock.torch import RankedTrainer, ReferenceUpdates, TorchPolicy, TorchTrainer
from penstock.weights import WeightPublisher

ModelFolder = Callable[[str], Path]

ADAM = partial(torch.optim.AdamW, lr=1e-3)
TOKENS = torch.arange(12)[None] * 5 % 300


def given(**options: Any) -> TrainBatch:
    """Return two groups of sequences of different lengths, with advantages, of tokens below 300."""
    lengths = [3, 9, 5]
    packed = batch(groups=2, completion_lengths=lengths, prompt_length=2, advantages=np.ones(23), **options)
    return msgspec.structs.replace(packed, tokens=packed.tokens * 7 % 300)


def trained(folder: Path, steps: int = 2, **options: Any) -> tuple[HFModel, TorchTrainer]:
    model = HFModel.from_pretrained(folder)
    trainer = TorchTrainer(model, optimizer=ADAM, **options)
    for _ in range(steps):
        trainer.step(given())
    return model, trainer


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    logits: Tensor = model.eval()(TOKENS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral"])
def test_micro_batches_change_neither_loss_nor_gradient(family: str, model_folder: ModelFolder) -> None:
    found = [
        trained(model_folder(family), steps=0, micro_batch_tokens=tokens)[1].step(given()) for tokens in (None, 24, 1)
    ]

    for name in ("loss", "grad_norm", "entropy"):
        assert [metrics[name] for metrics in found] == pytest.approx([found[0][name]] * 3, rel=1e-4)


@pytest.mark.long  # tracing takes 10 s
def test_a_compiled_model_takes_the_same_steps(model_folder: ModelFolder) -> None:
    traced = partial(torch.compile, dynamic=True, backend="aot_eager")
    found = [trained(model_folder("qwen2"), compile=each)[1].step(given()) for each in (None, traced)]

    for name in ("loss", "grad_norm", "entropy"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4)


def test_autocast_leaves_parameters_in_float32_and_changes_a_step_little(model_folder: ModelFolder) -> None:
    model, trainer = trained(model_folder("llama"), autocast=torch.bfloat16, steps=0)

    mixed, exact = trainer.step(given()), trained(model_folder("llama"), steps=0)[1].step(given())

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert mixed["entropy"] == pytest.approx(exact["entropy"], rel=1e-2)
    assert mixed["grad_norm"] == pytest.approx(exact["grad_norm"], rel=5e-2)


def test_an_averaged_reference_moves_tied_tensors_once(model_folder: ModelFolder) -> None:
    reference = HFModel.from_pretrained(model_folder("qwen2"))
    before = reference.state_dict()["lm_head.weight"].clone()
    updates = ReferenceUpdates(share=0.5)

    model, _ = trained(model_folder("qwen2"), steps=1, reference=reference, reference_updates=updates)

    middle = (before + model.state_dict()["lm_head.weight"]) / 2
    torch.testing.assert_close(reference.state_dict()["lm_head.weight"], middle)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_checkpoint_is_a_folder_that_transformers_loads(
    family: str, model_folder: ModelFolder, tokenizer_folder: Path, tmp_path: Path
) -> None:
    model, trainer = trained(model_folder(family))
    trainer.keep_tokenizer(PretrainedTokenizer(tokenizer_folder))

    checkpoint = trainer.save(tmp_path, {})

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert loaded.dtype == torch.float32
    assert torch.equal(logits_of(loaded), logits_of(model.module))
    text = "how many apples"
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint)
    ids = PretrainedTokenizer(checkpoint).encode(text)
    assert tokenizer.encode(text) == ids == PretrainedTokenizer(tokenizer_folder).encode(text)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<|user|>?<|end|><|assistant|>"


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_resumed_trainer_takes_the_steps_of_one_that_went_on(
    family: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    model, trainer = trained(model_folder(family))
    checkpoint = trainer.save(tmp_path, {})
    trainer.step(given())

    resumed, again = trained(model_folder(family), steps=0)
    again.resume(checkpoint)
    again.step(given())

    assert torch.equal(logits_of(resumed.module), logits_of(model.module))


def test_the_latest_checkpoint_of_a_run_is_exported_without_the_trainer_s_files(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    model, trainer = trained(model_folder("gemma"))
    trainer.save(tmp_path / "run" / "checkpoints", {})
    trainer.step(given())
    trainer.save(tmp_path / "run" / "checkpoints", {})

    into = export(tmp_path / "run", tmp_path / "exported")

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(into)
    assert torch.equal(logits_of(loaded), logits_of(model.module))
    assert not {"optimizer.pt", "optimizer.tensors", "state.json"} & {path.name for path in into.iterdir()}


def test_only_a_checkpoint_of_a_model_is_exported_and_only_into_an_empty_folder(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()

    with pytest.raises(InvalidConfig, match="expected a checkpoint of an HFModel"):
        export(tmp_path, tmp_path / "new")
    with pytest.raises(InvalidConfig, match="expected an empty folder"):
        export(model_folder("llama"), tmp_path / "full")


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
async def test_a_sampler_without_weights_of_its_own_has_views_of_those_published(
    family: str, model_folder: ModelFolder
) -> None:
    model, trainer = await to_thread.run_sync(trained, model_folder(family))
    sampler = await to_thread.run_sync(HFModel.empty, model_folder(family))
    prompts = [np.array(prompt, np.int32) for prompt in ([5, 6, 7, 8, 9, 10], [11, 12])]

    async with WeightPublisher(model) as publisher:
        await publisher.publish(trainer.weights(), 2)
        async with TorchPolicy(lambda: sampler, eos_id=0, weights=publisher.url).open(Worker()) as engine:
            found = await engine.generate(prompts, SamplingParams(max_completion_tokens=6))

        assert not any(parameter.requires_grad or parameter.is_meta for parameter in sampler.parameters())

    model.eval()
    for prompt, completion in zip(prompts, found, strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))
        with torch.no_grad():
            logprobs = model.module(tokens[None], use_cache=False).logits[0].log_softmax(-1)
        own = logprobs[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None])[:, 0]
        assert completion.logprobs == pytest.approx(own.numpy(), abs=1e-5)
        assert set(completion.policy_versions.tolist()) == {2}


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make this process the only one of its process group."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("autocast", [None, torch.float16])
@pytest.mark.parametrize("wrap", [fully_shard, DistributedDataParallel])
def test_a_model_that_ranks_share_takes_the_same_step(
    wrap: Any, autocast: torch.dtype | None, model_folder: ModelFolder
) -> None:
    alone, trainer = trained(model_folder("qwen2"), steps=0, autocast=autocast)
    shared = TorchTrainer(wrap(HFModel.from_pretrained(model_folder("qwen2"))), optimizer=ADAM, autocast=autocast)

    with RankedTrainer(shared) as ranked:
        found, expected = ranked.step(given()), trainer.step(given())
        weights = ranked.weights()

    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    torch.testing.assert_close(dict(weights), alone.state_dict(), atol=1e-5, rtol=0)


async def test_a_sampler_in_bfloat16_has_views_of_weights_that_are_published_so(model_folder: ModelFolder) -> None:
    model, trainer = await to_thread.run_sync(trained, model_folder("llama"))
    sampler = await to_thread.run_sync(partial(HFModel.empty, model_folder("llama"), dtype=torch.bfloat16))

    async with WeightPublisher(model, cast={"float32": "bfloat16"}) as publisher:
        await publisher.publish(trainer.weights(), 2)
        async with TorchPolicy(lambda: sampler, eos_id=0, weights=publisher.url).open(Worker()) as engine:
            await engine.generate([np.array([5, 6], np.int32)], SamplingParams(max_completion_tokens=2))

        expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
        torch.testing.assert_close(sampler.state_dict(), expected, atol=0, rtol=0)


class Kernels(TorchFunctionMode):
    """Records the shape of each dense mask that the attention kernel receives, or None for is_causal."""

    def __init__(self) -> None:
        self.masks: list[tuple[int, ...] | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            mask = (kwargs or {}).get("attn_mask")
            assert mask is not None or kwargs["is_causal"]
            self.masks.append(None if mask is None else tuple(mask.shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 makes a mask for every row")
def test_a_dense_mask_is_made_for_packed_rows_alone(model_folder: ModelFolder) -> None:
    _, trainer = trained(model_folder("llama"), steps=0)

    def masks(*lengths: int) -> set[tuple[int, ...] | None]:
        columns = {"prompt_length": 2, "advantages": np.ones(sum(lengths) + 2 * len(lengths))}
        packed = batch(groups=1, completion_lengths=list(lengths), **columns)
        with Kernels() as kernels:
            trainer.step(msgspec.structs.replace(packed, tokens=packed.tokens % 300))
        return set(kernels.masks)

    assert masks(9, 4, 3) == {(2, 1, 11, 11)}
    assert masks(9, 8, 7) == {None}
