"""Refuse, when the generator is made, settings of SkyRL's configuration that penstock does not have."""

from __future__ import annotations

from typing import Any

from ...._schemas import InvalidConfig

REFUSED = {
    "step_wise_trajectories": "rows for each step",
    "vision_language_generator": "images",
}
"""Options of a GeneratorConfig that penstock does not have."""


def refuse_unsupported(generator: Any) -> None:
    """Check `cfg.generator`.

    Raises:
        InvalidConfig: it asks for something that penstock does not have.
    """
    for name, what in REFUSED.items():
        if getattr(generator, name, False):
            raise InvalidConfig(f"generator.{name}: expected false, because penstock has no {what}, got true")
    if getattr(generator.chat_template, "name_or_path", None):
        raise InvalidConfig(
            f"generator.chat_template: expected the tokenizer's own, because tokens are kept as they were sampled, got "
            f"{generator.chat_template.name_or_path!r}"
        )
    engines = generator.inference_engine
    for name in ("enable_return_routed_experts", "enable_return_sample_support_set"):
        if getattr(engines, name, False):
            raise InvalidConfig(
                f"generator.inference_engine.{name}: expected false, got true: penstock records neither"
            )


def refuse_evaluation(trainer: Any) -> None:
    """Check `cfg.trainer` where the prompts are not SkyRL's.

    Raises:
        InvalidConfig: SkyRL would evaluate prompts of its own.
    """
    if trainer.eval_interval > 0:
        raise InvalidConfig(
            f"trainer.eval_interval: expected -1, because the groups that arrive answer no prompt of an evaluation, "
            f"and their senders evaluate by themselves, got {trainer.eval_interval}"
        )
