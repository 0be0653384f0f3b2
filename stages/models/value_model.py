"""ValueModel: the body of a causal model of transformers, with a head of one output: the value of each state.

A critic (PPO) trains it. Its head begins with zeros, so that all values are 0 before the first update, in every process
and with every seed. Its other tensors have transformers' own names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..._pipeline.errors import InvalidConfig
from ..contracts.attention import Attention
from ..contracts.causal_model import Read
from .hf_model import HFModel
from .lora_config import LoRA


class ValueModel(HFModel):
    """An `HFModel` that predicts values: the model of a `Critic`.

    `from_pretrained` and `empty` read the same folders, and replace the head. Every parameter trains.
    """

    def __init__(self, module: Any, folder: Path, lora: LoRA | None = None) -> None:
        """Wrap `module`, a causal model of transformers, made of `folder`; replace its head.

        Raises:
            InvalidConfig: with adapters, or if its logits are no linear head of its hidden states.
        """
        if lora is not None:
            raise InvalidConfig(
                f"{folder}: expected a critic without adapters, all of whose parameters train, got lora"
            )
        head = module.get_output_embeddings()
        value = nn.Linear(head.in_features, 1, bias=False, device=head.weight.device, dtype=head.weight.dtype)
        nn.init.zeros_(value.weight)
        module.set_output_embeddings(value)
        super().__init__(module, folder)
        if not self._passes_hidden:
            raise InvalidConfig(
                f"{folder}: expected a critic whose hidden states a linear head reads, got a {type(module).__name__}: "
                f"use another model"
            )

    @property
    def samples(self) -> bool:
        """Return that it has no logits to sample."""
        return False

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        attend: Attention,
        cache: Any = None,
        read: Read | None = None,
    ) -> Any:
        """Return what `read` makes of hidden states and the head; without it, hidden states [B, T, D]."""
        return super().forward(tokens, positions=positions, attend=attend, cache=cache, read=read or _hidden_states)


def _hidden_states(hidden: Tensor, weight: Tensor | None, bias: Tensor | None = None, finish: Any = None) -> Tensor:  # noqa: ARG001 (the form of `Read`)
    return hidden.float()
