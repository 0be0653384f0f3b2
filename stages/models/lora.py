"""LoRA adapters by peft, in the modules of a model: their names as peft writes them, and their merged weights.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021). Knows no trainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._pipeline.errors import InvalidConfig, WeightsMismatch
from ..._pipeline.util.extras import extra
from ..._schemas.config import nearest
from ..contracts.autocast import autocast_on
from .lora_config import LoRA

PREFIX = "base_model.model."
"""Begins each name in peft's files."""

ADAPTER = "default"
"""The name of the adapter within the modules; peft's files leave it out."""


ALL = "all-linear"
"""The targets that mean every linear layer but the head."""

PARAMETER = "parameter_name"
"""Attribute of peft's layers around a parameter, such as stacked experts, in place of a layer."""

PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
"""Names of the matrices of an adapter: of a layer, and of an embedding."""


def insert(module: nn.Module, lora: LoRA) -> None:
    """Insert adapters into `module`, without a change of its output yet, and freeze all its other parameters.

    The adapters are float32, beside a model of any dtype.

    Raises:
        InvalidConfig: a target is no layer of the module.
    """
    with extra("train", "LoRA"):
        import peft  # noqa: PLC0415 (a model without adapters does not need it)
    config = _config_of(module, lora)
    _check_targets(module, lora)
    ends = _tied_ends(module)
    try:
        peft.inject_adapter_in_model(config, module, adapter_name=ADAPTER)
    except (ValueError, re.error) as error:
        said = " ".join(str(error).split())
        raise InvalidConfig(f"LoRA.targets: expected names of layers, got {lora.targets!r}: {said}") from None
    except (TypeError, RuntimeError) as error:  # of torch: a size beyond 64 bits, or beyond the memory
        said = str(error).partition("\n")[0]
        raise InvalidConfig(f"LoRA.rank: expected adapters that fit, got rank {lora.rank}: {said}") from None
    if adapted := [name for name, _ in _adapted(module) if name in ends]:
        raise InvalidConfig(
            f"LoRA.targets: expected layers that share no weights, got {adapted[0]}, whose weights are those of "
            f"{' and '.join(sorted({*ends} - {*adapted}) or adapted)} too: adapters would change one of them, and no "
            f"merged model could have both: leave it out"
        )
    for name, parameter in module.named_parameters():
        if _is_adapter(name):
            parameter.data = parameter.data.float()
    for _, layer in _adapted(module):
        if not hasattr(layer, PARAMETER):
            layer.register_forward_pre_hook(_cast_once)


def _config_of(module: nn.Module, lora: LoRA) -> Any:
    """Return the configuration of adapters for peft, which changes it where it inserts them."""
    import peft  # noqa: PLC0415 (a model without adapters does not need it)

    targets = _linear_layers(module) if lora.targets == ALL else lora.targets
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number works
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )


def _linear_layers(module: nn.Module) -> str | list[str]:
    """Return the targets for every linear layer but the head; without those that a kernel of Mamba reads by itself.

    Its mixers pass the weights of `out_proj` to their fused kernels, which would leave adapters out.
    """
    mixers = {name for name, each in module.named_modules() if hasattr(each, "A_log") and hasattr(each, "D")}
    if not mixers:
        return ALL
    head = module.get_output_embeddings()  # type: ignore[operator]  # of transformers
    linear = {name for name, each in module.named_modules() if type(each) is nn.Linear and each is not head}
    return sorted(linear - {f"{mixer}.out_proj" for mixer in mixers})


def _cast_once(layer: Any, _: object) -> None:
    """Leave the dtype of the inputs to autocast where that is on: peft would copy them into float32 before it."""
    layer.cast_input_dtype_enabled = autocast_on(layer.weight.device) is None


def _tied_ends(module: Any) -> set[str]:
    """Return the names of the embedding and of the head where they share their weights."""
    first, last = module.get_input_embeddings(), module.get_output_embeddings()
    if first is None or last is None or first.weight is not last.weight:
        return set()
    return {name for name, each in module.named_modules() if each is first or each is last}


def _check_targets(module: nn.Module, lora: LoRA) -> None:
    """Check that each name is one of a layer: peft ignores one that is not, beside another one that is."""
    names = [name for name, _ in module.named_modules()]
    for target in () if isinstance(lora.targets, str) else lora.targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            known = sorted(
                {name.rpartition(".")[2] for name, each in module.named_modules() if type(each) is nn.Linear}
            )
            raise InvalidConfig(
                f"LoRA.targets: expected names of layers, such as {', '.join(known)}, got {target!r}"
                f"{nearest(target, known)}"
            )


def adapters(module: nn.Module) -> dict[str, Tensor]:
    """Return the adapters of `module`, by their names in peft's files."""
    return {_saved(name): tensor for name, tensor in module.state_dict().items() if _is_adapter(name)}


def load_adapters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the adapters of `module`.

    Raises:
        WeightsMismatch: their names or shapes are others.
    """
    own = adapters(module)
    tensors = _without_copies(module, tensors)
    if own.keys() != tensors.keys():
        missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
        raise WeightsMismatch(f"adapters: expected those of the model, got none of {missing} and unknown {unknown}")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            shapes = f"{list(tensor.shape)}, got {list(tensors[name].shape)}"
            raise WeightsMismatch(f"adapters: {name}: expected shape {shapes}: is `rank` that of the file?")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _without_copies(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` without copies of the model's: peft writes these beside the adapters of an embedding."""
    base = {f"{PREFIX}{name}": tensor for name, tensor in module.state_dict().items() if not _is_adapter(name)}
    copies = {name for name in tensors.keys() & base.keys() if torch.equal(tensors[name].to(base[name]), base[name])}
    return {name: tensor for name, tensor in tensors.items() if name not in copies}


@torch.no_grad()
def merged(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of `module` without adapters, under their own names, with the adapters added to them."""
    deltas = {_weight_of(name, layer): layer.get_delta_weight(ADAPTER) for name, layer in _adapted(module)}
    own = {name: tensor for name, tensor in module.state_dict().items() if not _is_adapter(name)}
    plain = {_plain(name): tensor for name, tensor in own.items()}
    return {name: tensor + deltas[name].to(tensor) if name in deltas else tensor for name, tensor in plain.items()}


def _weight_of(name: str, layer: Any) -> str:
    """Return the name of the weight that the adapters of `layer` are added to: of a layer, or of stacked experts."""
    return _plain(f"{name}.{getattr(layer, PARAMETER, 'weight')}")


def _plain(name: str) -> str:
    """Return the name of a tensor without adapters around it."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def switch(module: nn.Module, *, on: bool) -> None:
    """Switch the adapters of `module` on or off."""
    for _, layer in _adapted(module):
        layer.enable_adapters(on)


def write_config(module: nn.Module, lora: LoRA, folder: Path, base: Path) -> None:
    """Write `adapter_config.json`: peft and vLLM load the adapters beside it by that. `base` is the model's.

    Where peft changed the targets to the parameters of stacked experts, it does so again where it loads them.
    """
    config = _config(module)
    if config.target_parameters:
        config = _config_of(module, lora)
    config.base_model_name_or_path = str(base)
    config.save_pretrained(folder)


def _config(module: Any) -> Any:
    return module.peft_config[ADAPTER]


def _adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every layer with an adapter, and its name."""
    for name, layer in module.named_modules():
        if hasattr(layer, "get_delta_weight"):
            yield name, layer


def _is_adapter(name: str) -> bool:
    """Return whether `name` is of an adapter: of a layer, with `.weight` behind it, or of an embedding."""
    return any(f".{part}.{ADAPTER}." in f"{name}." for part in PARTS)


def _saved(name: str) -> str:
    return PREFIX + f"{name}.".replace(f".{ADAPTER}.", ".").removesuffix(".")
