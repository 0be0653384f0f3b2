"""What SkyRL's workers do on GPUs, on a CPU: the model's log-probabilities, SkyRL's own loss, an optimizer step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.skyrl_real.letters import PROMPT
from transformers import AutoModelForCausalLM

BACKEND = "skyrl.backends.skyrl_train"
WorkerOutput: Any = importlib.import_module(f"{BACKEND}.distributed.dispatch").WorkerOutput
PolicyLossRegistry: Any = importlib.import_module(f"{BACKEND}.utils.ppo_utils").PolicyLossRegistry


class CPUDispatch:
    """In the place of SkyRL's `WorkerDispatch`, with the methods that its trainers call."""

    def __init__(self, cfg: Any, learning_rate: float = 3e-3) -> None:
        self.cfg = cfg
        self.model: Any = AutoModelForCausalLM.from_pretrained(cfg.trainer.policy.model.path, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)
        self.loss = PolicyLossRegistry.get(cfg.trainer.algorithm.policy_loss_type)
        self.losses: list[float] = []
        self.trained: list[Any] = []
        """The batches that were trained."""
        self.at_step: Callable[[int], None] = lambda _: None
        """Called after each optimizer step, with its number."""

    @property
    def prompts(self) -> list[list[int]]:
        """Return the letters of the prompts of all rows that were trained, in the order of training."""
        rows = (row for data in self.trained for row in zip(data["sequences"], data["attention_mask"], strict=True))
        return [tokens[mask.bool()][:PROMPT].tolist() for tokens, mask in rows]

    def get_lcm_dp_size(self) -> int:
        return 1

    def init_weight_sync_state(self, inference_engine_client: Any) -> None:
        raise AssertionError(f"expected no weight sync, got one with {inference_engine_client}")

    async def save_weights_for_sampler(self) -> None:
        raise AssertionError("expected no weight sync")

    def _logprobs(self, data: Any) -> Any:
        """Return [B, R] the log-probabilities of the responses."""
        sequences, mask, length = data["sequences"], data["attention_mask"], data.metadata["response_length"]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self.model(sequences, attention_mask=mask, position_ids=positions).logits
        logits = logits[:, :-1] / self.cfg.trainer.algorithm.temperature
        return logits.log_softmax(-1).gather(-1, sequences[:, 1:, None])[..., 0][:, -length:]

    @torch.no_grad()
    def forward(self, model: str, data: Any) -> Any:
        assert model == "policy"
        return WorkerOutput(loss_fn_outputs=[{"logprobs": row} for row in self._logprobs(data).tolist()], metrics={})

    def forward_from_staged(self, model: str, chunk: Any) -> Any:
        return self.forward(model, chunk)

    def stage_data(self, model: str, data: Any, boundaries: list[tuple[int, int]]) -> list[Any]:
        assert model == "policy"
        return [data[start:end] for start, end in boundaries]

    def forward_backward_from_staged(self, model: str, chunk: Any) -> Any:
        assert model == "policy"
        self.trained.append(chunk)
        loss, metrics = self.loss(
            self._logprobs(chunk),
            chunk["action_log_probs"],
            chunk["advantages"],
            config=self.cfg.trainer.algorithm,
            loss_mask=chunk["loss_mask"],
            rollout_logprobs=chunk["rollout_logprobs"],
        )
        loss.backward()
        self.losses.append(loss.item())
        return WorkerOutput(loss_fn_outputs=[], metrics={"policy_loss": loss.item(), **metrics})

    def optim_step(self, model: str) -> float:
        assert model == "policy"
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.at_step(len(self.losses))
        return norm.item()

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> None:
        assert model == "policy"
        self.model.save_pretrained(export_dir)
        tokenizer.save_pretrained(export_dir)

    def save_checkpoint(self, model: str, ckpt_dir: str, tokenizer: Any = None) -> None:  # noqa: ARG002
        Path(ckpt_dir).mkdir(parents=True, exist_ok=True)
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, f"{ckpt_dir}/state.pt")

    def load_checkpoint(self, model: str, ckpt_dir: str, **_: Any) -> None:
        assert model == "policy"
        state = torch.load(f"{ckpt_dir}/state.pt")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def empty_cache(self, model: str | None = None) -> None:
        """Do nothing."""

    def finalize_pending_saves(self, model: str) -> None:
        """Do nothing."""

    def get_timing_metrics(self) -> dict[str, float]:
        return {}

    def get_node_ids(self) -> list[str]:
        return []
