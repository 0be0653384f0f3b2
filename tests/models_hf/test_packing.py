"""A model whose rows see each other is refused: by its layers, by one changed bit of its logits, or by its cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.models_hf import families
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


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("minimax", "whose states are in a MiniMaxCache of its own, which rows cannot join"),
        ("rwkv", "recurrent layers, which its layer_types do not state"),
        ("deepseek_v32", "whose logits depend on its place in the row"),
        ("deepseek_v4", "of which heavily_compressed_attention is not known to be causal"),
        ("moshi", "expected a model with the same logits with a cache as without"),
    ],
)
def test_a_family_whose_rows_could_not_be_sampled_is_refused(family: str, reason: str, tmp_path: Path) -> None:
    module = families.made(family)

    with pytest.raises(InvalidConfig) as refused:
        HFModel.from_pretrained(saved(module, tmp_path))

    assert f"got a {type(module).__name__}" in str(refused.value)
    assert reason in str(refused.value)


def test_a_hybrid_family_of_attention_layers_alone_is_packed(tmp_path: Path) -> None:
    module = families.made("granitemoehybrid", layer_types=["full_attention", "full_attention"])

    assert HFModel.from_pretrained(saved(module, tmp_path)).packs


def seeing_ahead(_: Any, given: tuple[Tensor, ...], **__: Any) -> Any:
    """Let each token of a layer read some of the one behind it."""
    return given[0] + 1e-6 * given[0].roll(-1, dims=1), *given[1:]


def test_a_model_with_states_in_which_a_token_reads_the_padding_behind_it_is_refused(tmp_path: Path) -> None:
    module = families.made("lfm2")
    module.model.layers[1].register_forward_pre_hook(seeing_ahead)
    model = HFModel(module, saved(module, tmp_path))

    with pytest.raises(InvalidConfig, match=r"whose logits depend on the padding behind them \(by .*: use another"):
        model.check_packing()


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
    return HFModel.from_pretrained(saved(made("llama", vocab_size=1024), tmp_path), attention="blind")


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
