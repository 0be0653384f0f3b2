"""A model whose packed sequences see each other is refused: by its layers, or by one changed bit of its logits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.cells import cells
from torch import Tensor

from penstock.errors import InvalidConfig
from penstock.losses import AdvantageWeighted
from penstock.models import HFModel
from penstock.testing import batch, drive, group
from penstock.torch import TorchReference, TorchTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}

STATEFUL: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 32, "mamba_n_heads": 4, "head_dim": 8},
    "jamba": {
        **EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
    },
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 1},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "zamba2": {**MAMBA, "n_mamba_heads": 8, "mamba_ngroups": 1, "layers_block_type": ["mamba", "hybrid"]},
    "granitemoehybrid": {**EXPERTS, **MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    "qwen3_next": {
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    "rwkv": {},
}
"""Families with states or convolutions, by transformers' name of the type."""

MIXTURE = {**EXPERTS, "hidden_size": 512, "intermediate_size": 300, "num_attention_heads": 8}
"""A shape in which the products of the experts are rounded otherwise where other experts were chosen."""


def made(kind: str, **special: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **special})
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_config(config)


def saved(module: Any, folder: Path) -> Path:
    module.save_pretrained(folder)
    return folder


def as_drawn(_: Any) -> None:
    """Leave the parameters as transformers draws them."""


@torch.no_grad()
def without_a_leak_yet(module: Any) -> None:
    """Make every state and convolution 0, which it is no more after a step."""
    for name, parameter in module.named_parameters():
        if any(part in name for part in ("conv", "mamba", "linear_attn", "rg_lru", "out_proj", "self_attn")):
            parameter.zero_()


@torch.no_grad()
def with_a_zero_embedding(module: Any) -> None:
    """Make the first tokens 0, as of a model whose padding token is one of them."""
    module.get_input_embeddings().weight[:2] = 0


@pytest.mark.parametrize(
    ("kind", "initialise"),
    cells(
        [(kind, as_drawn) for kind in STATEFUL]
        + [(kind, how) for kind in ("lfm2", "minimax", "jamba") for how in (without_a_leak_yet, with_a_zero_embedding)],
        run=[(kind, how) for kind in ("lfm2", "minimax", "jamba") for how in (as_drawn, with_a_zero_embedding)],
    ),
)
def test_a_model_with_states_of_earlier_tokens_is_refused_by_its_layers(
    kind: str, initialise: Callable[[Any], None], tmp_path: Path
) -> None:
    module = made(kind, **STATEFUL[kind])
    initialise(module)
    folder = saved(module, tmp_path)

    for make, attention in product((HFModel.from_pretrained, HFModel.empty), ("eager", "sdpa", "flex_attention")):
        with pytest.raises(InvalidConfig) as refused:
            make(folder, attention=attention)

        supported = "does not support" not in str(refused.value)
        assert not supported or f"got a {type(module).__name__} with " in str(refused.value)
        assert not supported or "whose states pass from one sequence to the next: use a model of" in str(refused.value)


def test_a_hybrid_family_of_attention_layers_alone_is_packed(tmp_path: Path) -> None:
    special = {**STATEFUL["granitemoehybrid"], "layer_types": ["attention", "attention"]}

    HFModel.from_pretrained(saved(made("granitemoehybrid", **special), tmp_path))


@pytest.mark.parametrize("kind", ["mixtral", "phimoe"])
def test_a_mixture_of_experts_is_packed_whatever_its_products_are_rounded_to(kind: str, tmp_path: Path) -> None:
    model = HFModel.from_pretrained(saved(made(kind, **MIXTURE), tmp_path))

    with torch.autocast("cpu", torch.bfloat16):
        model.check_packing()


def leak_by(share: float) -> Callable[..., Any]:
    """Return a hook of a layer by which each token reads some of the one before it."""

    def hook(_: Any, given: tuple[Tensor, ...], **__: Any) -> Any:
        return given[0] + share * given[0].roll(1, dims=1), *given[1:]

    return hook


@pytest.mark.parametrize(("kind", "special"), [("llama", {}), ("mixtral", MIXTURE)])
@pytest.mark.parametrize("share", [1.0, 1e-3, 1e-6])
def test_a_model_in_which_one_bit_passes_to_the_next_sequence_is_refused(
    kind: str, special: dict[str, Any], share: float, tmp_path: Path
) -> None:
    module = made(kind, **special)
    module.model.layers[1].register_forward_pre_hook(leak_by(share))
    model = HFModel(module.eval(), saved(module, tmp_path))

    with pytest.raises(
        InvalidConfig, match=r"whose logits depend on the sequence before \(by .*: use another attention"
    ):
        model.check_packing()


def blind(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
    """Return causal attention without any mask: a kernel that was given packed rows in a way that it does not read."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2).contiguous(), None


@pytest.fixture
def of_another_kernel(tmp_path: Path) -> HFModel:
    """Return a model whose kernel is not tried where it is loaded."""
    transformers.AttentionInterface.register("blind", blind)
    return HFModel.from_pretrained(saved(made("llama"), tmp_path), attention="blind")


def test_another_kernel_is_tried_in_the_first_step_before_it_trains(of_another_kernel: HFModel) -> None:
    before = {name: tensor.clone() for name, tensor in of_another_kernel.state_dict().items()}
    trainer = TorchTrainer(
        of_another_kernel,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        loss=AdvantageWeighted(),
    )

    with pytest.raises(InvalidConfig, match=r'depend on the sequence before .* with attention="blind"'):
        trainer.step(batch(groups=1, completion_lengths=[3, 3], advantages=np.linspace(-1, 1, 10)))

    torch.testing.assert_close(of_another_kernel.state_dict(), before, rtol=0, atol=0)


async def test_another_kernel_is_tried_before_a_reference_scores(of_another_kernel: HFModel) -> None:
    with pytest.raises(InvalidConfig, match=r'depend on the sequence before .* with attention="blind"'):
        await drive(TorchReference(lambda: of_another_kernel), [group(completion_lengths=[3, 3])])


def test_packing_is_tried_once_for_each_dtype(tmp_path: Path) -> None:
    model = HFModel.from_pretrained(saved(made("llama"), tmp_path))
    calls: list[str] = []
    model.module.register_forward_hook(lambda *_: calls.append("called"))

    for autocast in (False, True, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model.check_packing()

    assert len(calls) == 2
