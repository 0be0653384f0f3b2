"""The critic of a configured run: its model, and how its values make advantages. Knows no stage."""

from __future__ import annotations

from functools import partial

from ..._pipeline.util.hub import model_folder
from ..._schemas import check_tokenizers
from ..models.torch_sharding import Trainable
from ..models.value_model import ValueModel
from ..tokenizers.pretrained_tokenizer import PretrainedTokenizer
from ..training.optimizers import adamw
from ..training.torch_critic import Critic
from .run_config import RunConfig
from .torch_devices import device_of


def value_model(config: RunConfig) -> ValueModel | None:
    """Return the model of values with its weights, on the device that trains; None in a run without a critic. Blocks.

    Raises:
        InvalidConfig: its folder has no model, or one whose hidden states cannot be read.
    """
    if not config.algorithm.has_critic:
        return None
    model = config.model
    return ValueModel.from_pretrained(
        _folder(config),
        attention=model.attention,
        gradient_checkpointing=model.gradient_checkpointing,
        device=device_of(config),
    ).train()


def empty_value_model(config: RunConfig) -> ValueModel | None:
    """Return the model of values without weights, to look at; None in a run without a critic. Blocks.

    Raises: see `value_model`.
    """
    if not config.algorithm.has_critic:
        return None
    return ValueModel.empty(_folder(config), attention=config.model.attention)


def check_critic(model: ValueModel, tokenizer: PretrainedTokenizer) -> None:
    """Check that the model of values in a folder of its own reads the tokens of the policy. Blocks.

    Raises:
        TokenizersDiffer: it has another tokenizer.
    """
    check_tokenizers({"model.path": tokenizer, "critic.model": PretrainedTokenizer(str(model.folder))})


def critic_of(config: RunConfig, model: Trainable | None) -> Critic | None:
    """Return the critic with its model; None without one."""
    if model is None:
        return None
    optimizer, critic, algorithm = config.algorithm.optimizer, config.critic, config.algorithm
    return Critic(
        model=model,
        optimizer=partial(adamw, lr=critic.learning_rate, weight_decay=optimizer.weight_decay, betas=optimizer.betas),
        clip=critic.clip,
        warmup_steps=critic.warmup_steps,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
        rewards=algorithm.rewards,
    )


def _folder(config: RunConfig) -> str:
    return model_folder(config.critic.model or config.model.path)
