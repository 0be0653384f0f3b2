"""Tiny models of every family of transformers, with random weights, and how far an HFModel is from transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tests.models_hf.packed import packed_rows
from torch import Tensor
from torch.nn.functional import pad
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.errors import InvalidConfig
from penstock.models import HFModel
from penstock.torch import Attention, JoinableCache, positions_of

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

HEAD = "| family | class | a row of a trainer has | logits | gradients | with a cache |\n|---|---|---|---|---|---|\n"
"""The first lines of the table of families."""

ROUNDING, ROUNDING_OF_GRADIENTS = 1e-5, 2e-5

LENGTHS = (7, 13, 4)
"""Tokens of the sequences that are compared."""

LARGEST = 1 << 21
"""Parameters of the largest model that is made."""

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len"), 128),
    "head_dim": 8,
    "rotary_dim": 4,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    "expert_ffn_hidden_size": 16,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8),
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "sliding_window": 5,
    **dict.fromkeys(("index_head_dim", "index_topk"), 8),
    "index_n_heads": 2,
    "state_size": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "n_mamba_heads": 8,
    "mamba_num_heads": 8,
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 4),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
"""Sizes of a tiny model, by every name that configurations have for them; a configuration gets those that it has."""

LINEAR_AND_FULL = ["linear_attention", "full_attention"]

SLIDING_AND_FULL = ["sliding_attention", "full_attention"]

PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}

EVERY_HEAD = {"num_key_value_heads": 4}
"""Layers with compressed keys have as many heads of keys as of queries."""

COMPRESSED = [
    "axk1",
    "axk2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "minicpm3",
    "youtu",
]
"""Families with compressed keys."""

SPECIAL: dict[str, Mapping[str, Any]] = {
    **{family: {**EVERY_HEAD, "head_dim": 4} for family in COMPRESSED},
    "kimi_linear": {
        **EVERY_HEAD,
        "head_dim": 4,
        "layer_types": LINEAR_AND_FULL,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "bailing_hybrid": {**EVERY_HEAD, "layer_types": LINEAR_AND_FULL, "mlp_layer_types": ["dense", "sparse"]},
    "longcat_flash": {**EVERY_HEAD, "head_dim": 4, "zero_expert_num": 2},
    "qwen4_exp_text": {"layer_types": LINEAR_AND_FULL},
    "cwm": {"bos_token_id": 1, "pad_token_id": 1},
    "modernbert-decoder": {"bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1, "pad_token_id": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": SLIDING_AND_FULL,
        "activation_sparsity_pattern": None,
        **PER_LAYER,
    },
    "gemma4_text": {"layer_types": SLIDING_AND_FULL, **PER_LAYER},
    "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "zaya": {"num_experts_per_tok": 1},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4},
    "granitemoehybrid": {"layer_types": LINEAR_AND_FULL},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "minimax": {"layer_types": LINEAR_AND_FULL, "block_size": 4},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "olmo_hybrid": {"layer_types": LINEAR_AND_FULL, "linear_num_value_heads": 2},
    "qwen3_5_moe_text": {"layer_types": LINEAR_AND_FULL},
    "qwen3_5_text": {"layer_types": LINEAR_AND_FULL},
    "qwen3_next": {"layer_types": LINEAR_AND_FULL},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
}
"""What a family needs besides, so that a tiny model has each kind of its layers."""


class Differences(NamedTuple):
    """The largest differences from transformers, as shares of the largest number that was compared."""

    rows: float
    """Of the logits of sequences in the rows of a trainer."""
    gradients: float
    """Of the gradients of a weighted sum of these logits."""
    cached: float
    """Of the logits of tokens that were read with a cache, after rows of other lengths joined, if rows may join."""
    packs: bool
    """Whether rows may have several sequences."""

    def within(self) -> bool:
        """Return whether they are but rounding of float32."""
        return max(self.rows, self.cached) < ROUNDING and self.gradients < ROUNDING_OF_GRADIENTS


def families() -> Iterator[str]:
    """Yield the families of transformers with a causal model, by the names of their types."""
    yield from sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def in_the_table() -> dict[str, bool]:
    """Return the families in the table, and whether rows of each may have several sequences."""
    lines = PAGE.read_text("utf-8").partition(HEAD)[2].partition("\n\n")[0].splitlines()
    cells = [line.split(" | ") for line in lines]
    return {cell[0].strip("| `"): cell[2] == "several sequences" for cell in cells}


def write_table(lines: list[str]) -> None:
    """Replace the lines of the table."""
    before, _, after = PAGE.read_text("utf-8").partition(HEAD)
    rest = after.partition("\n\n")[2]
    PAGE.write_text(f"{before}{HEAD}{chr(10).join(lines)}\n\n{rest}", "utf-8")


def made(family: str, **special: Any) -> Any:
    """Return a tiny model of transformers, in evaluation mode."""
    torch.manual_seed(0)
    configured = transformers.AutoConfig.for_model(family)
    config = transformers.AutoConfig.for_model(family, **{**_sizes(configured), **_parts(configured), **special})
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(each.numel() for each in auto.from_config(config).parameters())
    assert size < LARGEST, f"{family}: expected a tiny model, got {size} parameters"
    module = auto.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "bias" in name or "sinks" in name:  # transformers begins with zeros, which hide mistakes
                parameter.normal_(0, 0.1)
    return module


def _sizes(configured: Any) -> dict[str, Any]:
    """Return the sizes of a tiny model by the names of a configuration."""
    known = {name for name in SMALL if name in configured.to_dict()}
    return {**{name: SMALL[name] for name in known}, **SPECIAL.get(configured.model_type, {})}


def _parts(configured: Any) -> dict[str, Any]:
    """Return the configurations of the parts of a model with a language model in it, all tiny."""
    return {name: _sizes(getattr(configured, name)) | {"depth": 1} for name in configured.sub_configs}


def differences(folder: Path) -> Differences:
    """Return how far the HFModel of a folder is from transformers' own."""
    ours, theirs = _ours(folder), _of_transformers(folder)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(1, 64, (length,), generator=generator) for length in LENGTHS]
    weights = torch.randn(64, generator=generator)

    alone = [theirs(each[None], use_cache=False).logits[0] for each in sequences]
    torch.autograd.backward(torch.stack([(each @ weights).sum() for each in alone]).sum())
    rows = [sequences] if ours.packs else [[each] for each in sequences]
    tokens, positions, attend = packed_rows(*rows)
    logits = ours(tokens, positions=positions, attend=attend)
    found = torch.cat([logits[attend.sequences == number] for number in range(len(rows[0]))])
    torch.autograd.backward((found @ weights).sum())
    named = dict(theirs.named_parameters())
    trained = {name: each for name, each in ours.module.named_parameters() if named[name].grad is not None}
    largest = max(float(named[name].grad.abs().max()) for name in trained)
    return Differences(
        rows=_share(found, torch.cat(alone)),
        gradients=max(_share(each.grad, named[name].grad, largest / 1000) for name, each in trained.items()),
        cached=_share(*_cached(ours, sequences, [each.detach() for each in alone])),
        packs=ours.packs,
    )


def _ours(folder: Path) -> HFModel:
    try:
        return HFModel.from_pretrained(folder)
    except InvalidConfig as refused:
        if 'give attention="eager"' not in str(refused):
            raise
        return HFModel.from_pretrained(folder, attention="eager")


def _of_transformers(folder: Path) -> Any:
    auto: Any = transformers.AutoModelForCausalLM
    try:
        model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True)
    except ValueError:  # it has none
        model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True)
    return model.eval()


@torch.inference_mode()
def _cached(model: HFModel, sequences: list[Tensor], alone: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits of the last three tokens of each sequence, their prompts read alone and joined; and `alone`."""
    cache, found = _prompts(model, [each[:-2] for each in sequences])
    for left in (2, 1):
        lengths = torch.tensor([[len(each) - left] for each in sequences])
        tokens = torch.stack([each[-left] for each in sequences])[:, None]
        seen = torch.arange(cache.length + 1) >= cache.length - lengths
        found += model(tokens, positions=lengths, attend=Attention.causal(seen, tokens=1), cache=cache)[:, -1]
    expected = [each[-left] for left in (3, 2, 1) for each in alone]
    return torch.stack(found), torch.stack(expected)


def _prompts(model: HFModel, prompts: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """Return the cache of prompts, and the logits [V] behind each."""
    if not isinstance(model.new_cache(1, 1), JoinableCache):
        width = max(map(len, prompts))
        tokens = torch.stack([pad(each, (width - len(each), 0)) for each in prompts])
        real = torch.stack([pad(torch.ones_like(each), (width - len(each), 0)) for each in prompts]) > 0
        cache = model.new_cache(len(prompts), width)
        read = model(tokens, positions=positions_of(real), attend=Attention.causal(real), cache=cache)
        return cache, [*read[:, -1]]
    caches, found = list[Any](), list[Tensor]()
    for each in prompts:
        real = torch.ones(1, len(each), dtype=torch.bool)
        caches.append(model.new_cache(1, len(each)))
        read = model(each[None], positions=positions_of(real), attend=Attention.causal(real), cache=caches[-1])
        found.append(read[0, -1])
    for other in caches[1:]:
        caches[0].join(other)
    return caches[0], found


def _share(one: Tensor | None, other: Tensor, least: float = 1e-30) -> float:
    """Return the largest difference as a share of the largest number, or of `least`: some gradients are rounding."""
    assert one is not None
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max() / other.abs().max().clamp(min=least))
