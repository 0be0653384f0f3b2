"""An environment of Atropos, in a process with its own interpreter, that feeds SkyRL's trainer of this process."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from tests.atropos_real.processes import ROOT, Environment, serve
from tests.atropos_real.trained import LONGEST, Sequence
from tests.atropos_real.workspace import save_tokenizer
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup, source
from penstock.integrations.atropos import AtroposClient, AtroposGateway, ServerConfig
from penstock.integrations.skyrl import PenstockGenerator

SETTINGS = "PENSTOCK_TEST_PAIR"
"""The variable with the `Settings`, which a trainer in a process of its own reads too."""

PATH = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
"""PYTHONPATH of a process that has penstock and the tests."""

SEQUENCES = 16
"""Of a step: four groups of four."""

OPTIONS: dict[str, Any] = {
    "trainer.max_prompt_length": 512,
    "generator.max_input_length": 512,
    "generator.sampling_params.max_generate_length": LONGEST,
}

environments: list[Environment] = []
"""Those that were started, the first one first."""


class Settings(msgspec.Struct, frozen=True):
    """The places of everything, and the way of the groups."""

    checkout: str
    workspace: str
    model_server: str
    folder: str
    """Of the environments' files."""
    script: str = "gsm8k_server.py"
    """The environment, below `environments/` of the checkout, or with its whole path."""
    gateway: str = ""
    """The URL of a gateway in a process of its own; without one, it listens in that of the trainer."""

    def start(self, url: str) -> Environment:
        """Start an environment that sends to the gateway at `url`."""
        folder = Path(self.folder) / f"environment_{len(environments)}"
        folder.mkdir(exist_ok=True)
        path, workspace = Path(self.checkout) / "environments", Path(self.workspace)
        options = ("--env.max_token_length", str(LONGEST))
        started = serve(path / self.script, url, self.model_server, workspace, *options, folder=folder, path=path)
        environments.append(started)
        return started


def write_model(folder: Path) -> Path:
    """Write a tiny Qwen2 with the tokenizer of the environments into `folder`; return it."""
    save_tokenizer(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": LONGEST}
    words = len(AutoTokenizer.from_pretrained(folder))
    Qwen2ForCausalLM(Qwen2Config(vocab_size=words, **sizes, **heads)).save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int = 64) -> Path:
    """Write a data set of SkyRL that counts `count` prompts."""
    row = {"prompt": [{"role": "user", "content": "-"}], "env_class": "atropos"}
    path.write_text((json.dumps(row) + "\n") * count)
    return path


@dataclass
class WithEnvironment:
    """A stage that starts an environment when the gateway listens, and lets groups through."""

    settings: Settings
    gateway: AtroposGateway

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        await anyio.to_thread.run_sync(self.settings.start, await self.gateway.listening.url())
        async for group in inbox:
            await outbox.send(group)


def generator(cfg: Any, tokenizer: Any) -> PenstockGenerator:
    """Return the generator of an experiment that trains what environments send."""
    settings = msgspec.json.decode(os.environ[SETTINGS], type=Settings)
    sizes: dict[str, Any] = {"batch_size": SEQUENCES, "max_token_len": LONGEST}
    sizes["num_steps"] = cfg.trainer.max_training_steps
    if settings.gateway:
        return PenstockGenerator(source(AtroposClient(api_url=settings.gateway, **sizes)), cfg, tokenizer)
    gateway = AtroposGateway(server=ServerConfig(port=0), departure_timeout_s=60.0, **sizes)
    return PenstockGenerator(source(gateway).then(WithEnvironment(settings, gateway)), cfg, tokenizer)


@dataclass
class Trained:
    """The rows of SkyRL's tensors, in the form in which they can be compared with what an environment sent."""

    rows: Counter[Sequence] = field(default_factory=Counter)

    def of(self, trainer: Any) -> Trained:
        """Record what SkyRL's own conversion makes of every batch of `trainer`."""
        convert = trainer.convert_to_training_input

        def recorded(*args: Any) -> Any:
            data = convert(*args)
            for row in zip(*(data[name].numpy() for name in TENSORS), strict=True):
                tokens, trains, logprobs, reward = unpadded(row)
                self.rows[tokens.tobytes(), trains.tobytes(), logprobs.tobytes(), None, reward] += 1
            return data

        trainer.convert_to_training_input = recorded
        return self


TENSORS = ("sequences", "attention_mask", "response_mask", "loss_mask", "rollout_logprobs", "rewards")
"""What SkyRL's conversion makes of a batch; the first two end with the last token, as the others do."""


def unpadded(row: Iterable[Any]) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32], float]:
    """Return [T] tokens of a row of `TENSORS`, whether they train, the log-probabilities of those, and the reward."""
    tokens, attended, response, mask, logprobs, rewards = row
    length, count = int(attended.sum()), int(response.sum())
    trains, kept = np.zeros(length, np.bool_), np.zeros(length, np.float32)
    trains[length - count :] = mask[-count:] > 0
    kept[length - count :] = np.where(mask[-count:] > 0, logprobs[-count:], np.float32(0))
    return tokens[-length:].astype(np.int32), trains, kept, float(rewards.sum())
