"""GRPO by penstock beside TRL's GRPOTrainer: seconds a step, and growth of memory, on the same model and data.

    python -m benchmarks.trainers [--vocabularies 8192 151936]

A Qwen2 with random weights, prompts of random words, completions of random length below a bound. A step has the same
prompts, completions and number of updates everywhere, and the model computes one group at a time. The contestants
alternate, each in a process of its own:

- TRL's trainer, where it is installed, as its GRPOConfig is by default: it computes in bfloat16 where that is safe, on
  a CPU too, and computes activations again in the backward pass;
- the same in float32 and with stored activations, as penstock is by default;
- the same with the output layer at the positions that train alone, as TRL computes it on CUDA: one function of TRL's
  that asks for a device with Triton is answered yes where it selects positions; its kernels remain those of a CPU;
- penstock in one process;
- penstock with a process that samples, where a step is trained while the next one is sampled.

Growth is the peak of the resident memory of the process that trains, over that before the first step: for penstock in
one process that with the engine inside, for the other that with the engine outside.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

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

from .machine import mapped_again_mb, peak_from_here, resident_mb
from .report import command_line, count, median_of, print_table, write_json

__all__ = ["main"]

GROUP = 8

IN_FLOAT32: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False}
"""Options of a GRPOConfig that computes in float32 and stores activations."""


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
    step_cpu_s: float
    """Processor time of the process that trains, which other processes of the machine change less."""
    training_s: float
    """Without sampling and rewards."""
    training_cpu_s: float
    grown_mb: float

    @classmethod
    def of(cls, ends: list[Times], training: list[Times], grown_mb: float) -> Measured:
        """Return the medians, from the ends of all steps, and what training took in each."""
        steps, trained = np.diff(ends, axis=0), np.array(training)[1:]
        (step_s, step_cpu_s), (training_s, training_cpu_s) = (np.median(of, axis=0).tolist() for of in (steps, trained))
        return cls(step_s, step_cpu_s, training_s, training_cpu_s, grown_mb)


DIGITS = (2, 2, 2, 2, 0)
"""Of the numbers of `Measured`, as printed."""


class Times(NamedTuple):
    """The time of a clock, and processor time of this process, in seconds."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Times:
        """Return those of now."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, earlier: Times) -> Times:
        """Return what passed since `earlier`."""
        return Times(self.wall - earlier.wall, self.cpu - earlier.cpu)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a number that differs between completions."""
    return [sum(completion.encode()) % 97 / 97 for completion in completions]


def make_files(folder: Path, size: Size) -> list[dict[str, str]]:
    """Write a model with its tokenizer into `folder`, and return the rows of the data."""
    import transformers  # noqa: PLC0415 (takes seconds)

    make_tokenizer(folder, size.vocabulary)
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


def make_tokenizer(folder: Path, vocabulary: int) -> Any:
    """Write a tokenizer of so many words into `folder`, and return it."""
    import transformers  # noqa: PLC0415 (takes seconds)
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 (as above)

    names = ["<end>", "<pad>", *(f"w{number}" for number in range(2, vocabulary))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="w2"))  # noqa: S106 (no secret)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")  # noqa: S106 (as above)
    tokenizer.save_pretrained(folder)
    return tokenizer


# -- TRL ---------------------------------------------------------------------------------------------------------------


def measure_trl(folder: Path, rows: list[dict[str, str]], size: Size, **options: Any) -> Measured:
    """Train with TRL's GRPOTrainer, with `options` of its GRPOConfig."""
    import transformers  # noqa: PLC0415 (takes seconds)

    trainer, ends, training = trl_trainer(
        str(folder),
        rows,
        transformers.PreTrainedTokenizerFast.from_pretrained(folder),
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=GROUP,
        gradient_accumulation_steps=size.prompts,
        max_completion_length=size.completion,
        max_steps=size.steps + 1,
        use_cpu=True,
        **options,
    )
    before = peak_from_here()
    trainer.train()
    return Measured.of(ends, training, resident_mb("VmHWM") - before)


def trl_trainer(
    model: Any,
    rows: list[dict[str, str]],
    tokenizer: Any,
    given: Mapping[str, Any] = MappingProxyType({}),
    finish: Callable[[], None] = lambda: None,
    **options: Any,
) -> tuple[Any, list[Times], list[Times]]:
    """Return TRL's GRPOTrainer, and two lists that it fills: the end of each step, and what training took in it.

    Args:
        model: a folder, or a model of transformers.
        rows: prompts.
        tokenizer: of transformers.
        given: further arguments of the trainer.
        finish: waits until the device has done a step.
        options: of its GRPOConfig.
    """
    import datasets  # noqa: PLC0415 (takes seconds)
    import transformers  # noqa: PLC0415 (as above)

    trl: Any = importlib.import_module("trl")  # it may be absent
    ends: list[Times] = []
    training: list[Times] = []
    prepared: list[Times] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            finish()
            ends.append(Times.now())
            last = ends[-2] if len(ends) > 1 else ends[-1]
            training.append(Times(*np.subtract(ends[-1].since(last), np.sum(prepared, axis=0)).tolist()))
            prepared.clear()

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc] # of any type
        def _prepare_inputs(self, batch: Any) -> Any:
            began = Times.now()
            inputs = super()._prepare_inputs(batch)
            prepared.append(Times.now().since(began))
            return inputs

    common: dict[str, Any] = {
        "num_generations": GROUP,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    trainer = Trainer(
        model=model,
        reward_funcs=reward,
        args=trl.GRPOConfig(**common | options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
        **given,
    )
    return trainer, ends, training


def measure_trl_as_on_cuda(folder: Path, rows: list[dict[str, str]], size: Size) -> Measured:
    """Train with TRL's GRPOTrainer in float32, with its output layer at the positions that train alone."""
    utils: Any = importlib.import_module("trl.trainer.utils")
    with patch.object(utils, "_use_triton", lambda _: True):
        return measure_trl(folder, rows, size, **IN_FLOAT32)


# -- penstock ----------------------------------------------------------------------------------------------------------


class Timed:
    """A trainer whose steps are timed."""

    def __init__(self, trainer: TorchTrainer, steps: int) -> None:
        self._trainer = trainer
        self._steps = steps
        self.ends: list[Times] = []
        self.took: list[Times] = []
        self.again_mb = 0.0
        """Memory that counts twice: an engine in this process maps that of the publisher."""

    def step(self, batch: TrainBatch) -> Mapping[str, float]:
        """Take a step."""
        began = Times.now()
        metrics = self._trainer.step(batch)
        self.ends.append(Times.now())
        self.took.append(self.ends[-1].since(began))
        if len(self.ends) == self._steps:
            self.again_mb = mapped_again_mb()
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
        ),
        size.steps + 1,
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
            )
            sequences = size.prompts * GROUP
            pipeline = (
                source(env, on=processes(samplers) if samplers else here(), max_lag=lag)
                .then(RewardBridge(functions=[trl_reward(reward)]))
                .then(AdvantageNormalizer("grpo"))
                .then(Batcher(max_tokens=sequences * (size.prompt_tokens + size.completion), sequences=sequences))
                .sink(SinkTrainer(trainer, publisher, max_steps=size.steps + 1))
            )
            await pipeline.run()

    before = peak_from_here()
    anyio.run(run)
    return Measured.of(trainer.ends, trainer.took, resident_mb("VmHWM") - trainer.again_mb - before)


CONTESTANTS: dict[str, Callable[[Path, list[dict[str, str]], Size], Measured]] = {
    "TRL": measure_trl,
    "TRL, float32": partial(measure_trl, **IN_FLOAT32),
    "TRL, as on CUDA": measure_trl_as_on_cuda,
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
    """Print the medians, and their ratios to those of TRL."""
    head = ("", "s a step", "CPU s", "s training", "CPU s", "MB grown")
    rows = [
        [
            f"{name}, {vocabulary:,}",
            *(median_of(values, digits) for values, digits in zip(zip(*all_of, strict=True), DIGITS, strict=True)),
        ]
        for (vocabulary, name), all_of in found.items()
    ]
    print_table(console, "a step of GRPO", head, rows)
    for peer in dict.fromkeys(name for _, name in found if name.startswith("TRL")):
        rows = [
            [f"{name}, {vocabulary:,}", *_ratios(all_of, found[vocabulary, peer])]
            for (vocabulary, name), all_of in found.items()
            if name != peer and (vocabulary, peer) in found
        ]
        print_table(console, f"ratios to {peer}, by repetition", head, rows)


def _ratios(measured: list[Measured], peer: list[Measured]) -> list[str]:
    """Return the ratio of each number to that of the same repetition."""
    each = [np.divide(own, other).tolist() for own, other in zip(measured, peer, strict=True)]
    return [median_of(ratios, 2) for ratios in zip(*each, strict=True)]


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = command_line(__doc__, seconds=None, repeats=3)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8192, 151_936])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=count, default=2, help="groups of 8 in a step")
    parser.add_argument("--prompt-tokens", type=count, default=64)
    parser.add_argument("--completion", type=count, default=128, help="tokens of the longest completion")
    parser.add_argument("--steps", type=count, default=3, help="measured steps, after one that warms up")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure_here(options.one[0], Size(*json.loads(options.one[1])))))
        return
    installed = importlib.util.find_spec("trl") is not None
    names = [name for name in options.contestants if installed or not name.startswith("TRL")]
    found: dict[tuple[int, str], list[Measured]] = defaultdict(list)
    for _ in range(options.repeats):
        for vocabulary in options.vocabularies:
            values = {field: getattr(options, field) for field in Size._fields if field != "vocabulary"}
            for name in names:
                measured = in_a_process(name, Size(vocabulary, **values))
                found[vocabulary, name].append(measured)
                print(f"{name}, {vocabulary:,}: {measured}", file=sys.stderr)
    show(found, Console(width=120))
    write_json(options.json, {"rows": [[*key, *each] for key, measured in found.items() for each in measured]})


if __name__ == "__main__":
    main()
