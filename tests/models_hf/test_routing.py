"""Mixtures train with the experts that sampled: recorded by the engine, and replayed by the trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
import transformers
from tests.models_hf.mixtures import PROMPTS, QWEN3, SGD, Distance, batch_of, disturbed, sampled, stepped, write_mixture
from tests.tiny_model import TinyModel

from penstock import TrainBatch, TrajectoryGroup
from penstock.errors import InvalidConfig, InvalidRecord
from penstock.models import HFModel, LoRA
from penstock.torch import TorchTrainer

CLOSE, FAR = 1e-5, 1e-2
"""Difference of log-probabilities by rounding, and by other experts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"), **QWEN3)


@pytest.fixture(scope="module")
def batch(folder: Path) -> TrainBatch:
    """Return completions with their experts."""
    return batch_of(anyio.run(sampled, partial(HFModel.from_pretrained, folder)))


async def test_every_token_but_the_last_has_the_experts_of_each_layer(folder: Path) -> None:
    completions = await sampled(partial(HFModel.from_pretrained, folder))

    for completion, prompt in zip(completions, [p for p in PROMPTS for _ in range(2)], strict=True):
        experts = completion.routed_experts
        assert experts is not None
        assert experts.dtype == np.uint8
        assert experts.shape == (len(prompt) + len(completion.tokens), 2, 2)
        assert (experts[:-1, :, 0] != experts[:-1, :, 1]).all()
        assert not experts[-1].any()


async def test_rows_that_join_others_have_the_experts_of_rows_alone(folder: Path) -> None:
    make = partial(HFModel.from_pretrained, folder)
    together = await sampled(make, max_rows=3)
    alone = [completion for prompt in PROMPTS for completion in await sampled(make, [prompt], max_rows=1)]

    for one, other in zip(together, alone, strict=True):
        length = min(len(one.tokens), len(other.tokens))
        same = int(np.argmin(np.append(one.tokens[:length] == other.tokens[:length], False)))
        known = len(one.routed_experts) - len(one.tokens) + same - 1  # type: ignore[arg-type]
        np.testing.assert_array_equal(one.routed_experts[:known], other.routed_experts[:known])  # type: ignore[index]


OPTIONS: list[dict[str, Any]] = [
    {"micro_batch_tokens": None},
    {"micro_batch_tokens": 40},
    {"micro_batch_tokens": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "model", [{}, {"lora": LoRA(rank=2, targets=("q_proj", "v_proj"))}, {"gradient_checkpointing": True}], ids=str
)
def test_replayed_log_probabilities_are_those_of_the_engine(
    folder: Path, batch: TrainBatch, model: dict[str, Any], options: dict[str, Any]
) -> None:
    replayed, _ = stepped(disturbed(HFModel.from_pretrained(folder, **model)), batch, router_replay="R3", **options)
    free, _ = stepped(disturbed(HFModel.from_pretrained(folder, **model)), batch, **options)

    assert replayed.largest < CLOSE
    assert free.largest > FAR


def test_a_record_of_all_layers_fits_too(folder: Path, batch: TrainBatch) -> None:
    """As vLLM and SGLang return it, with zeros in layers without experts."""
    assert batch.routed_experts is not None
    first, second = batch.routed_experts[:, 0], batch.routed_experts[:, 1]
    wide = np.stack([first, np.zeros_like(first), second], axis=1).astype(np.uint16)
    found, _ = stepped(
        disturbed(HFModel.from_pretrained(folder)),
        msgspec.structs.replace(batch, routed_experts=wide),
        router_replay="R3",
    )

    assert found.largest < CLOSE


def test_tokens_without_a_record_choose_their_own_experts(folder: Path, batch: TrainBatch) -> None:
    nothing = msgspec.structs.replace(batch, routed_experts=np.zeros_like(batch.routed_experts))
    found, _ = stepped(HFModel.from_pretrained(folder), nothing, router_replay="R3")
    free, _ = stepped(HFModel.from_pretrained(folder), batch)

    assert torch.equal(torch.cat(found.seen), torch.cat(free.seen))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_chosen_experts_and_reach_the_router(
    folder: Path, batch: TrainBatch, *, checkpointing: bool
) -> None:
    """The router's own choice is recorded, so a replay changes no gradient."""
    models = [HFModel.from_pretrained(folder, gradient_checkpointing=checkpointing) for _ in range(2)]

    stepped(models[0], batch, router_replay="R3", micro_batch_tokens=40)
    stepped(models[1], batch, micro_batch_tokens=40)

    untouched = HFModel.from_pretrained(folder).state_dict()
    for name, tensor in models[0].state_dict().items():
        torch.testing.assert_close(tensor, models[1].state_dict()[name], atol=1e-6, rtol=1e-4)
        if name.endswith("gate.weight"):
            assert not torch.equal(tensor, untouched[name])


@pytest.mark.parametrize(("mode", "kept"), [("R2", True), (None, False)])
def test_later_updates_keep_the_experts_of_the_first_pass(
    folder: Path, batch: TrainBatch, mode: Any, *, kept: bool
) -> None:
    model = HFModel.from_pretrained(folder)
    tiny = partial(torch.optim.SGD, lr=1e-6)
    loss = Distance()
    TorchTrainer(model, optimizer=tiny, loss=loss, router_replay=mode, updates=2, micro_batch_tokens=None).step(batch)

    first, second = loss.seen
    assert (float((first - second).abs().max()) < 1e-3) == kept


LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": 16},
    "mixtral": {},
    "olmoe": {},
    "deepseek_v3": {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4},
    "glm4_moe": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "minimax_m2": {"rotary_dim": 8},
    "qwen3_next": {**LINEAR, "shared_expert_intermediate_size": 16},
    "qwen3_5_moe_text": {**LINEAR, "shared_expert_intermediate_size": 16},
    "granitemoehybrid": {**MAMBA, "shared_intermediate_size": 16, "layer_types": LINEAR["layer_types"]},
    "jamba": {**MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
}
"""Mixtures with softmax, sigmoid, groups of experts, shared experts, biases, layers without experts, and states, whose
prompts of different lengths are read one after the other."""


@pytest.mark.parametrize("kind", FAMILIES)
def test_mixtures_of_other_families_are_replayed_too(kind: str, tmp_path: Path) -> None:
    folder = write_mixture(tmp_path, kind, **FAMILIES[kind])
    make = partial(HFModel.from_pretrained, folder)
    batch = batch_of(anyio.run(sampled, make))

    replayed, _ = stepped(disturbed(make()), batch, router_replay="R3")
    free, _ = stepped(disturbed(make()), batch)

    assert replayed.largest < 3 * CLOSE  # states round more: they are summed token by token, or by chunks
    assert free.largest > 100 * CLOSE


@pytest.mark.parametrize(
    ("kind", "special", "reason"),
    [
        ("phimoe", {}, "expected routers that return the indices .* got a PhimoeTopKRouter of a PhimoeForCausalLM"),
        ("qwen3", {}, "expected a mixture of experts, got a Qwen3ForCausalLM, which has no routers"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 1},
            "expected a mixture that chooses 2 experts a token or more, got .* 1",
        ),
    ],
)
def test_a_model_whose_choice_cannot_be_given_is_refused_by_name(
    kind: str, special: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = write_mixture(tmp_path, kind, **special)

    with pytest.raises(InvalidConfig, match=reason):
        TorchTrainer(HFModel.from_pretrained(folder), optimizer=SGD, router_replay="R3")
    with pytest.raises(InvalidConfig, match=reason):
        anyio.run(sampled, partial(HFModel.from_pretrained, folder))


def test_what_cannot_be_replayed_is_refused_by_name(folder: Path, batch: TrainBatch) -> None:
    model = HFModel.from_pretrained(folder)
    assert batch.routed_experts is not None
    records = {
        "expected the experts of the engine that sampled, .* got none": None,
        "expected 2 experts of 2 layers, or of all 3, .* got 2 of 1": batch.routed_experts[:, :1],
        "expected 2 experts of 2 layers, or of all 3, .* got 1 of 2": batch.routed_experts[:, :, :1],
        "expected numbers below 8, got 200": np.full_like(batch.routed_experts, 200),
    }

    for reason, record in records.items():
        with pytest.raises(InvalidRecord, match=reason):
            stepped(model, msgspec.structs.replace(batch, routed_experts=record), router_replay="R3")
    options: list[dict[str, Any]] = [{"router_replay": "R3"}, {"router_replay": "R2"}, {"router_aux_loss": 0.1}]
    for option in options:
        with pytest.raises(InvalidConfig, match=f"{next(iter(option))}: expected a mixture of experts, .* a TinyModel"):
            TorchTrainer(TinyModel(), optimizer=SGD, **option)
        with pytest.raises(InvalidConfig, match="expected a model that is not compiled"):
            TorchTrainer(model, optimizer=SGD, compile=torch.compile, **option)
    with pytest.raises(InvalidConfig, match="router_replay: expected one of R2, R3, got 'R4'"):
        TorchTrainer(model, optimizer=SGD, router_replay="R4")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="router_aux_loss: expected a finite number of 0 or more, got -1"):
        TorchTrainer(model, optimizer=SGD, router_aux_loss=-1)


def test_a_load_balancing_loss_that_transformers_lacks_is_refused_by_name(tmp_path: Path) -> None:
    model = HFModel.from_pretrained(write_mixture(tmp_path, "deepseek_v3", **FAMILIES["deepseek_v3"]))

    with pytest.raises(InvalidConfig, match=r"expected a model with a load balancing loss .* a DeepseekV3ForCausalLM"):
        TorchTrainer(model, optimizer=SGD, router_aux_loss=0.1)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "minimax_m2"])
def test_the_load_balancing_loss_of_a_sequence_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = write_mixture(tmp_path, kind, **FAMILIES.get(kind, {}))
    tokens = torch.arange(3, 20)
    packed = TrainBatch.pack(
        [
            TrajectoryGroup.build(
                env="e",
                instance_id="0",
                sequences=[tokens.numpy()],
                loss_mask=[np.arange(len(tokens)) > 3],
                rewards=[1.0],
                behavior_logprobs=[np.zeros(len(tokens))],
            ).with_advantages([1.0])
        ]
    )
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.config.output_router_logits = True

    _, plain = stepped(HFModel.from_pretrained(folder), packed)
    model = HFModel.from_pretrained(folder)
    _, metrics = stepped(model, packed, router_aux_loss=10.0, max_grad_norm=None)

    found = theirs(tokens[None], output_router_logits=True)
    assert metrics["router_aux_loss"] == pytest.approx(found.aux_loss.item(), rel=1e-5)
    assert "router_aux_loss" not in plain
    loss = -found.logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[3:].mean() + 10 * found.aux_loss
    loss.backward()
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            expected = parameter.detach() - 0.1 * parameter.grad
            torch.testing.assert_close(model.state_dict()[name], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_load_balancing_loss_counts_no_padding_and_has_one_value_over_updates(
    folder: Path, batch: TrainBatch, *, checkpointing: bool
) -> None:
    found = [
        stepped(
            HFModel.from_pretrained(folder, gradient_checkpointing=checkpointing),
            batch,
            router_aux_loss=1e-12,
            router_replay=mode,
            updates=updates,
            micro_batch_tokens=40,
        )[1]["router_aux_loss"]
        for mode, updates in [(None, 1), ("R2", 1), ("R3", 1)]
    ]

    assert found == pytest.approx([found[0]] * len(found), rel=1e-5)
    assert 1.0 < found[0] * 4 / 2 < 10.0
