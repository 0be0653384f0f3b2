"""GRPO by penstock beside TRL's GRPOTrainer: seconds a step, and growth of memory, on the same model and data.

    python -m benchmarks.trainers [--vocabularies 8192 151936]

A Qwen2 with random weights, prompts of random words, completions of random length below a bound. A step has the same
prompts, completions and number of updates everywhere, and the model computes one group at a time in float32. The
contestants alternate, each in a process of its own: TRL's trainer, where it is installed; penstock in one process; and
penstock with a process that samples, where a step is trained while the next one is sampled.

Growth is the peak of the resident memory of the process that trains, over that before the first step.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import torch
from rich.console import Console

from penstock import (
    AdvantageNormalizer,
    Batcher,
    RewardBridge,
    SinkTrainer,
    SourceEnv,
    TrainBatch,
    here,
    processes,
    source,
)
from penstock.data import PromptDataset
from penstock.models import HFModel
from penstock.policies import PretrainedTokenizer, SamplingParams
from penstock.rewards import trl_reward
from penstock.torch import TorchPolicy, TorchTrainer, adamw
from penstock.weights import WeightPublisher

from .machine import resident_mb
from .report import command_line, count, median_of, print_table, write_json

__all__ = ["main"]

GROUP = 8


class Size(NamedTuple):
    """The size of the model, and of a step."""

    vocabulary: int
    width: int
    layers: int
    prompts: int
    prompt_tokens: int
    completion: int
    steps: int
    threads: int


class Measured(NamedTuple):
    """The cost of a step, in medians over all but the first one."""

    step_s: float
    """From the end of a step to the end of the next one."""
    training_s: float
    """Without sampling and rewards."""
    grown_mb: float


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a number that differs between completions."""
    return [sum(completion.encode()) % 97 / 97 for completion in completions]


def make_files(folder: Path, size: Size) -> list[dict[str, str]]:
    """Write a model with its tokenizer into `folder`, and return the rows of the data."""
    import transformers  # noqa: PLC0415 (takes seconds)
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 (as above)

    names = ["<end>", "<pad>", *(f"w{number}" for number in range(2, size.vocabulary))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="w2"))  # noqa: S106 (no secret)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)  # noqa: S106 (as above)
    config = transformers.Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.width * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // 64,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    random = np.random.default_rng(0)
    rows = random.integers(2, size.vocabulary, (size.prompts * (size.steps + 2), size.prompt_tokens))
    return [{"prompt": " ".join(f"w{number}" for number in row)} for row in rows]


# -- TRL ---------------------------------------------------------------------------------------------------------------


def measure_trl(folder: Path, rows: list[dict[str, str]], size: Size) -> Measured:
    """Train with TRL's GRPOTrainer."""
    import datasets  # noqa: PLC0415 (takes seconds)
    import transformers  # noqa: PLC0415 (as above)

    trl: Any = importlib.import_module("trl")  # it may be absent
    ends: list[float] = []
    preparing: dict[int, float] = defaultdict(float)

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc] # of any type
        def _prepare_inputs(self, batch: Any) -> Any:
            began = time.perf_counter()
            prepared = super()._prepare_inputs(batch)
            preparing[len(ends)] += time.perf_counter() - began
            return prepared

    trainer = Trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=reward,
        args=trl.GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=size.prompts,
            num_generations=GROUP,
            max_completion_length=size.completion,
            max_steps=size.steps + 1,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            beta=0.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(folder),
        callbacks=[Clock()],
    )
    before = resident_mb("VmRSS")
    trainer.train()
    took = np.diff(ends)
    training = [each - preparing[number] for number, each in enumerate(took.tolist(), start=1)]
    return Measured(float(np.median(took)), statistics.median(training), resident_mb("VmHWM") - before)


# -- penstock ----------------------------------------------------------------------------------------------------------


class Timed:
    """A trainer whose steps are timed."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self._trainer = trainer
        self.ends: list[float] = []
        self.took: list[float] = []

    def step(self, batch: TrainBatch) -> Mapping[str, float]:
        """Take a step."""
        began = time.perf_counter()
        metrics = self._trainer.step(batch)
        self.ends.append(time.perf_counter())
        self.took.append(self.ends[-1] - began)
        return metrics

    def weights(self) -> Any:
        """Return the weights to publish."""
        return self._trainer.weights()


def sampled_model(folder: Path, threads: int) -> HFModel:
    """Make the model in the process that samples."""
    torch.set_num_threads(threads)
    return HFModel.empty(folder)


def measure_penstock(folder: Path, rows: list[dict[str, str]], size: Size, *, samplers: int) -> Measured:
    """Train with TorchTrainer."""
    model, tokenizer = HFModel.from_pretrained(folder), PretrainedTokenizer(folder)
    trainer = Timed(
        TorchTrainer(
            model,
            optimizer=partial(adamw, lr=1e-5),
            max_grad_norm=1.0,
            micro_batch_tokens=GROUP * (size.prompt_tokens + size.completion),
        )
    )
    lag = 1 if samplers else 0

    async def run() -> None:
        async with WeightPublisher(model) as publisher:
            made = partial(sampled_model, folder, size.threads)
            policy = TorchPolicy(made, eos_id=tokenizer.eos_id, weights=publisher.url)
            env = SourceEnv(
                PromptDataset(rows),
                policy,
                tokenizer,
                group_size=GROUP,
                sampling=SamplingParams(max_completion_tokens=size.completion),
                concurrency=size.prompts * GROUP * (1 + lag),
                max_lag=lag,
                step_groups=size.prompts,
            )
            sequences = size.prompts * GROUP
            pipeline = (
                source(env, on=processes(samplers) if samplers else here())
                .then(RewardBridge(tokenizer=tokenizer, functions=[trl_reward(reward)]))
                .then(AdvantageNormalizer("grpo"))
                .then(
                    Batcher(
                        max_tokens=sequences * (size.prompt_tokens + size.completion), sequences=sequences, max_lag=lag
                    )
                )
                .sink(SinkTrainer(trainer, publisher, max_steps=size.steps + 1))
            )
            await pipeline.run()

    before = resident_mb("VmRSS")
    anyio.run(run)
    return Measured(
        float(np.median(np.diff(trainer.ends))), statistics.median(trainer.took[1:]), resident_mb("VmHWM") - before
    )


CONTESTANTS: dict[str, Callable[[Path, list[dict[str, str]], Size], Measured]] = {
    "TRL": measure_trl,
    "penstock": partial(measure_penstock, samplers=0),
    "penstock, 1 sampler": partial(measure_penstock, samplers=1),
}


# -- the command -------------------------------------------------------------------------------------------------------


def in_a_process(name: str, size: Size) -> Measured:
    """Measure a contestant in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.trainers", "--one", name, json.dumps(size)]
    environment = os.environ | {"OMP_NUM_THREADS": str(size.threads), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603 (this module itself)
    return Measured(*json.loads(ended.stdout.splitlines()[-1]))


def measure_here(name: str, size: Size) -> Measured:
    """Measure a contestant in this process."""
    torch.set_num_threads(size.threads)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        rows = make_files(folder, size)
        return CONTESTANTS[name](folder, rows, size)


def show(found: Mapping[tuple[int, str], list[Measured]], console: Console) -> None:
    """Print the medians, and the ratios to TRL's."""
    rows = []
    for (vocabulary, name), measured in found.items():
        beside = found.get((vocabulary, "TRL"), measured)
        rows.append([f"{name}, {vocabulary:,}"])
        for field in Measured._fields:
            values = [float(getattr(each, field)) for each in measured]
            ratio = statistics.median(values) / statistics.median(float(getattr(each, field)) for each in beside)
            rows[-1] += [median_of(values, 0 if field == "grown_mb" else 2), f"{ratio:.2f}"]
    head = ("", "s a step", "", "s training", "", "MB grown", "")
    print_table(console, "a step of GRPO, and its ratio to TRL's", head, rows)


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = command_line(__doc__, seconds=None, repeats=3)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8192, 151_936])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=count, default=4, help="groups of 8 in a step")
    parser.add_argument("--prompt-tokens", type=count, default=64)
    parser.add_argument("--completion", type=count, default=128, help="tokens of the longest completion")
    parser.add_argument("--steps", type=count, default=3, help="measured steps, after one that warms up")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure_here(options.one[0], Size(*json.loads(options.one[1])))))
        return
    names = [name for name in CONTESTANTS if name != "TRL" or importlib.util.find_spec("trl")]
    found: dict[tuple[int, str], list[Measured]] = defaultdict(list)
    for _ in range(options.repeats):
        for vocabulary in options.vocabularies:
            values = {field: getattr(options, field) for field in Size._fields if field != "vocabulary"}
            for name in names:
                found[vocabulary, name].append(in_a_process(name, Size(vocabulary, **values)))
    show(found, Console(width=120))
    write_json(options.json, {"rows": [[*key, *each] for key, measured in found.items() for each in measured]})


if __name__ == "__main__":
    main()
