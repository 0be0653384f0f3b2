"""Adapters alone train, are published and are saved; merged, they are a model like any other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from anyio import to_thread
from safetensors.torch import load_file, save_file
from tests.models_hf.mixtures import QWEN3, write_mixture
from torch import Tensor

from penstock import TrainBatch, Worker
from penstock.errors import InvalidConfig, WeightsMismatch
from penstock.losses import KL, AdvantageWeighted, PPOClip
from penstock.models import HFModel, LoRA, MergedWeights, export
from penstock.policies import SamplingParams
from penstock.testing import batch
from penstock.torch import Attention, TorchPolicy, TorchTrainer, WeightFolder
from penstock.weights import WeightPublisher, WeightSubscriber

ModelFolder = Callable[[str], Path]

TOKENS = torch.arange(12)[None] * 5 % 300
POSITIONS, ATTEND = torch.arange(12)[None], Attention.packed(torch.zeros(1, 12, dtype=torch.int64))
ADAM = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    logits: Tensor = model(TOKENS, positions=POSITIONS, attend=ATTEND)
    return logits


def answers(token: int = 7) -> TrainBatch:
    """Return two groups whose every completion token is `token`, with an advantage of 1."""
    packed = batch(groups=2, completion_lengths=[4, 6], prompt_length=2, advantages=np.ones(14))
    return msgspec.structs.replace(
        packed, tokens=np.where(packed.loss_mask, token, packed.tokens % 300).astype(np.int32)
    )


def trained(folder: Path, steps: int = 3) -> tuple[HFModel, TorchTrainer]:
    torch.manual_seed(0)
    model = HFModel.from_pretrained(folder, lora=LoRA(rank=4))
    trainer = TorchTrainer(model, optimizer=ADAM, loss=AdvantageWeighted())
    for _ in range(steps):
        trainer.step(answers())
    return model, trainer


def probability(model: HFModel) -> float:
    """Return the mean probability of the tokens of `answers`, as TorchTrainer scores them."""
    packed = answers()
    mean = 0.0
    for first, last in zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
        tokens = torch.from_numpy(packed.tokens[first:last].copy()).long()[None]
        length = tokens.shape[1]
        attend = Attention.packed(torch.zeros_like(tokens))
        with torch.no_grad():
            found = model(tokens, positions=torch.arange(length)[None], attend=attend)[0, :-1].softmax(-1)[:, 7]
        mean += found[packed.loss_mask[first + 1 : last].copy()].mean().item()
    return mean / (len(packed.cu_seqlens) - 1)


def test_new_adapters_change_no_logit(model_folder: ModelFolder) -> None:
    plain = HFModel.from_pretrained(model_folder("qwen2"))
    adapted = HFModel.from_pretrained(model_folder("qwen2"), lora=LoRA(rank=4))

    assert torch.equal(logits_of(adapted), logits_of(plain))


def test_adapters_learn_an_answer_while_the_model_stays_as_it_was(model_folder: ModelFolder) -> None:
    plain = HFModel.from_pretrained(model_folder("qwen2"))
    adapted, trainer = trained(model_folder("qwen2"), steps=0)
    before = probability(adapted)

    for _ in range(20):
        trainer.step(answers())

    assert before < 0.01
    assert probability(adapted) > 0.06  # the frozen head, small as it is, allows no more
    base = {
        name.replace(".base_layer.", "."): each for name, each in adapted.named_parameters() if ".lora_" not in name
    }
    assert base.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(each, base[name]) for name, each in plain.named_parameters())


def test_adapters_are_float32_beside_a_model_in_bfloat16(model_folder: ModelFolder) -> None:
    model = HFModel.from_pretrained(model_folder("llama"), dtype=torch.bfloat16, lora=LoRA(rank=4))
    trainer = TorchTrainer(model, optimizer=ADAM, loss=AdvantageWeighted(), autocast=torch.bfloat16)
    before = probability(model)

    for _ in range(5):
        trainer.step(answers())

    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    assert probability(model) > 2 * before


@pytest.mark.parametrize(("autocast", "expected"), [(torch.bfloat16, torch.bfloat16), (None, torch.float32)])
def test_inputs_of_adapters_are_cast_once(
    autocast: torch.dtype | None, expected: torch.dtype, model_folder: ModelFolder
) -> None:
    model = HFModel.from_pretrained(model_folder("llama"), dtype=torch.bfloat16, lora=LoRA(rank=4))
    dtypes = set[torch.dtype]()
    for name, layer in model.module.named_modules():
        if name.endswith("lora_A.default"):
            layer.register_forward_pre_hook(lambda _, inputs: dtypes.add(inputs[0].dtype))

    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        logits_of(model)

    assert dtypes == {expected}


def test_without_adapters_the_model_is_the_reference(model_folder: ModelFolder) -> None:
    plain = HFModel.from_pretrained(model_folder("llama"))
    adapted, _ = trained(model_folder("llama"))
    after = logits_of(adapted)

    reference = adapted.reference()

    assert torch.equal(logits_of(reference), logits_of(plain))
    assert torch.equal(logits_of(adapted), after)
    assert not torch.allclose(after, logits_of(plain), atol=1e-2)


def test_a_trainer_takes_the_divergence_from_the_model_without_adapters(model_folder: ModelFolder) -> None:
    model = HFModel.from_pretrained(model_folder("llama"), lora=LoRA(rank=4))
    loss = PPOClip() + 0.01 * KL("k3")
    trainer = TorchTrainer(model, optimizer=ADAM, reference=model.reference(), loss=loss)

    first, *_, last = (trainer.step(answers()) for _ in range(4))

    assert first["loss/kl"] == 0
    assert last["loss/kl"] > 0.01


def test_a_model_without_adapters_has_no_such_reference(model_folder: ModelFolder) -> None:
    with pytest.raises(ValueError, match="expected a model with adapters"):
        HFModel.from_pretrained(model_folder("llama")).reference()


def test_a_checkpoint_has_the_adapters_that_peft_loads(model_folder: ModelFolder, tmp_path: Path) -> None:
    import peft  # noqa: PLC0415 (it takes seconds, also of processes that do not run this test)

    model, trainer = trained(model_folder("qwen2"))

    checkpoint = trainer.save(tmp_path, {})

    base = transformers.AutoModelForCausalLM.from_pretrained(model_folder("qwen2"), dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, checkpoint)
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, logits_of(model.eval()))
    assert sum(tensor.numel() for tensor in load_file(checkpoint / "adapter_model.safetensors").values()) < 30_000
    assert not (checkpoint / "model.safetensors").exists()


def test_a_resumed_trainer_takes_the_steps_of_one_that_went_on(model_folder: ModelFolder, tmp_path: Path) -> None:
    model, trainer = trained(model_folder("qwen2"))
    checkpoint = trainer.save(tmp_path, {})
    trainer.step(answers())

    resumed, again = trained(model_folder("qwen2"), steps=0)
    again.resume(checkpoint)
    again.step(answers())

    assert torch.equal(logits_of(resumed), logits_of(model))


def test_a_checkpoint_with_adapters_is_a_model(model_folder: ModelFolder, tmp_path: Path) -> None:
    model, trainer = trained(model_folder("gemma"))

    again = HFModel.from_pretrained(trainer.save(tmp_path, {}))

    assert again.lora is not None
    assert again.lora.rank == 4
    torch.testing.assert_close(logits_of(again), logits_of(model.eval()))


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_an_exported_model_has_the_adapters_in_its_weights(
    family: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    model, trainer = trained(model_folder(family))
    trainer.save(tmp_path / "run" / "checkpoints", {})

    into = export(tmp_path / "run", tmp_path / "exported")

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(into)
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, logits_of(model.eval()), atol=1e-5, rtol=0)
    assert {"tokenizer.json", "chat_template.jinja"} <= {path.name for path in into.iterdir()}


def test_adapters_are_exported_apart_on_request(model_folder: ModelFolder, tmp_path: Path) -> None:
    _, trainer = trained(model_folder("llama"))

    into = export(trainer.save(tmp_path, {}), tmp_path / "exported", merge=False)

    names = {path.name for path in into.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    assert not names & {"model.safetensors", "optimizer.pt", "optimizer.tensors", "state.json"}


async def test_a_sampler_has_the_frozen_model_and_receives_the_adapters(model_folder: ModelFolder) -> None:
    model, trainer = await to_thread.run_sync(trained, model_folder("llama"))
    async with WeightPublisher(model) as publisher:
        await publisher.publish(trainer.weights(), 3)
        assert sum(tensor.numel() for tensor in trainer.weights().values()) < 30_000

        policy = TorchPolicy(partial(with_adapters, model_folder("llama")), eos_id=0, weights=publisher.url)
        async with policy.open(Worker()) as engine:
            (completion,) = await engine.generate(
                [np.array([5, 6], np.int32)], SamplingParams(max_completion_tokens=5, greedy=True)
            )

    assert completion.policy_versions.tolist() == [3] * len(completion.tokens)
    assert completion.tokens.tolist() == greedy(model.eval(), [5, 6], len(completion.tokens))


async def test_an_engine_without_adapters_receives_merged_weights(model_folder: ModelFolder, tmp_path: Path) -> None:
    model, trainer = await to_thread.run_sync(trained, model_folder("qwen2"))
    plain = await to_thread.run_sync(HFModel.from_pretrained, model_folder("qwen2"))

    async with WeightFolder(tmp_path, model.merged()) as folder:
        await MergedWeights(folder, model).publish(trainer.weights(), 1)
        async with WeightSubscriber(folder.url) as subscriber:
            subscriber.attach(plain)
            await subscriber.newer()
            await to_thread.run_sync(subscriber.refresh)

    torch.testing.assert_close(logits_of(plain), logits_of(model.eval()), atol=1e-5, rtol=0)


@torch.no_grad()
def greedy(model: HFModel, prompt: list[int], count: int) -> list[int]:
    """Return the likeliest completion, one pass over the whole sequence for each token."""
    tokens = torch.tensor([prompt])
    for _ in range(count):
        attend = Attention.packed(torch.zeros_like(tokens))
        logits = model(tokens, positions=torch.arange(tokens.shape[1])[None], attend=attend)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens[0, len(prompt) :].tolist()


def with_adapters(folder: Path) -> HFModel:
    return HFModel.from_pretrained(folder, lora=LoRA(rank=4))


# -- adapters of peft --------------------------------------------------------------------------------------------------


def by_peft(base: Path, folder: Path, **options: Any) -> Tensor:
    """Write adapters with random weights by peft, and return the logits of the model with them."""
    import peft  # noqa: PLC0415 (as above)

    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **options})
    adapted: Any = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder)
    with torch.no_grad():
        logits: Tensor = adapted.eval()(TOKENS).logits
    return logits


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora_dropout": 0.1},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"target_modules": r".*\.q_proj"},
        {"target_modules": "all-linear", "task_type": "CAUSAL_LM"},
        {"r": 2, "lora_alpha": 3},
        {"bias": "none", "modules_to_save": None, "rank_pattern": {}},
    ],
    ids=str,
)
def test_adapters_of_peft_have_the_logits_of_peft(
    options: dict[str, Any], model_folder: ModelFolder, tmp_path: Path
) -> None:
    expected = by_peft(model_folder("llama"), tmp_path, **options)

    torch.testing.assert_close(logits_of(HFModel.from_pretrained(tmp_path)), expected)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("use_rslora", {"use_rslora": True}),
        ("alpha_pattern", {"alpha_pattern": {"q_proj": 16}}),
        ("rank_pattern", {"rank_pattern": {"q_proj": 2}}),
        ("init_lora_weights", {"init_lora_weights": "pissa"}),
        ("init_lora_weights", {"init_lora_weights": "olora"}),
        ("use_dora", {"use_dora": True}),
        ("bias", {"bias": "all"}),
        ("lora_bias", {"lora_bias": True}),
        ("layers_to_transform", {"layers_to_transform": [0]}),
        ("modules_to_save", {"modules_to_save": ["lm_head"]}),
        ("exclude_modules", {"exclude_modules": ["v_proj"]}),
        ("layer_replication", {"layer_replication": [[0, 2], [1, 2]]}),
        ("trainable_token_indices", {"trainable_token_indices": [3]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_of_peft_that_changes_the_computation_is_refused_by_its_name(
    field: str, options: dict[str, Any], model_folder: ModelFolder, tmp_path: Path
) -> None:
    by_peft(model_folder("llama"), tmp_path, **options)

    with pytest.raises(InvalidConfig, match=rf"adapter_config.json: {field}: expected .*merge_and_unload"):
        HFModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type: expected LORA, got 'IA3'"),
        ({"peft_type": None}, "peft_type: expected LORA, got None"),
        ({"r": None}, "r: expected a value, got None"),
        ({"target_modules": None}, "target_modules: expected a value, got None"),
        ({"a_field_of_next_year": "on"}, "a_field_of_next_year: expected None, got 'on'"),
    ],
)
def test_a_configuration_of_peft_that_is_not_known_is_refused(
    changes: dict[str, Any], message: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    by_peft(model_folder("llama"), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | changes))

    with pytest.raises(InvalidConfig, match=f"adapter_config.json: {message}"):
        HFModel.from_pretrained(tmp_path)


def test_weights_of_another_rank_than_the_configuration_are_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    by_peft(model_folder("llama"), tmp_path, r=1)
    path = tmp_path / "adapter_config.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | {"r": 4}))

    with pytest.raises(WeightsMismatch, match=r"expected shape \[4, 32\], got \[1, 32\]"):
        HFModel.from_pretrained(tmp_path)


# -- adapters of embeddings --------------------------------------------------------------------------------------------

WITH_EMBEDDING = LoRA(rank=4, targets=("embed_tokens", "q_proj", "lm_head"))


def test_adapters_of_an_embedding_of_peft_have_the_logits_of_peft(model_folder: ModelFolder, tmp_path: Path) -> None:
    expected = by_peft(model_folder("llama"), tmp_path, target_modules=["embed_tokens", "q_proj"])

    torch.testing.assert_close(logits_of(HFModel.from_pretrained(tmp_path)), expected)


def test_a_changed_embedding_beside_adapters_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    by_peft(model_folder("llama"), tmp_path, target_modules=["embed_tokens", "q_proj"])
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.model.embed_tokens.base_layer.weight"] += 1
    save_file(tensors, path)

    with pytest.raises(WeightsMismatch, match=r"unknown .*embed_tokens.base_layer.weight"):
        HFModel.from_pretrained(tmp_path)


def test_adapters_of_an_embedding_are_trained_saved_exported_and_loaded(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    model = HFModel.from_pretrained(model_folder("llama"), lora=WITH_EMBEDDING)
    trainer = TorchTrainer(model, optimizer=ADAM, loss=AdvantageWeighted())
    fresh = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    for _ in range(3):
        trainer.step(answers())

    checkpoint = trainer.save(tmp_path / "run" / "checkpoints", {})
    again = HFModel.from_pretrained(checkpoint)
    exported = HFModel.from_pretrained(export(tmp_path / "run", tmp_path / "exported"))

    trained_names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trainer.weights()) == len(trained_names) == 2 * 4
    assert all(not torch.equal(tensor, fresh[name]) for name, tensor in trainer.weights().items())
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in trainer.weights().items())
    torch.testing.assert_close(logits_of(again), logits_of(model.eval()))
    torch.testing.assert_close(logits_of(exported), logits_of(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapters_of_an_embedding_that_is_the_head_too_are_refused(target: str, model_folder: ModelFolder) -> None:
    with pytest.raises(InvalidConfig, match=rf"LoRA.targets: expected layers that share no weights, got .*{target}"):
        HFModel.from_pretrained(model_folder("qwen2"), lora=LoRA(rank=4, targets=(target, "q_proj")))


@pytest.mark.parametrize("targets", [("gate_up_proj",), ("experts",), ("gate_proj",), "layers.0.mlp.experts", ".*("])
def test_targets_that_are_no_layers_of_a_mixture_are_refused_in_one_line(targets: Any, tmp_path: Path) -> None:
    write_mixture(tmp_path, **QWEN3)

    with pytest.raises(InvalidConfig, match=r"^LoRA.targets: expected names of layers.*\Z") as refused:
        HFModel.from_pretrained(tmp_path, lora=LoRA(rank=4, targets=targets))
    assert "\n" not in str(refused.value)
