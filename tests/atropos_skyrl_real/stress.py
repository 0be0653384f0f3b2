"""A million samples from environment workers to SkyRL's tensors, compared by hash; HTTP beside it; memory; no test.

    ATROPOS_PYTHON=.venv/atropos/bin/python PYTHONPATH=src:. .venv/skyrl/bin/python -m tests.atropos_skyrl_real.stress

Four workers, processes of Atropos' interpreter, begin with lists of Python numbers. The groups go through an
`AtroposGateway` and a `PenstockGenerator` into SkyRL's own validation, post-processing and conversion; every batch of
1,000 samples is committed. No model runs. Cases, each in a process of its own:

    hashed      a million samples through shared memory; hashes of tokens, masks, log-probabilities, rewards and stop
                reasons are compared with those of the senders
    shm, http   fewer samples without hashes, sent through shared memory, and as Atropos sends them
    slots       1,000 groups that wait: the memory that they take
    inside      a trainer with an engine in its process, and `outside`: with none, for groups arrive
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from tests.atropos_real.processes import PYTHON, offline
from tests.atropos_skyrl_real.hashes import HASH_BYTES, digest
from tests.atropos_skyrl_real.pair import TENSORS, unpadded, write_model, write_prompts
from tests.skyrl_real.letters import write_model as write_letters
from tests.skyrl_real.letters import write_prompts as write_letter_prompts
from tests.skyrl_real.own_engine import InProcess
from tests.skyrl_real.training import config_of, trainer_of

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup, source
from penstock.integrations.atropos import AtroposGateway, ServerConfig
from penstock.integrations.skyrl import PenstockGenerator

WORKERS = 4
GROUP = 8
"""As that of `benchmarks.atropos_clients`, by which the workers send."""
PROMPTS = 125
"""Of a batch, which has 1,000 samples."""
BATCH = PROMPTS * GROUP
SLOTS = 1000
PREFIX = "MEASURED "


@dataclass
class Announces:
    """A stage that says where the gateway listens, and lets groups through."""

    gateway: AtroposGateway
    url: Future[str] = field(default_factory=Future)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        self.url.set_result(await self.gateway.listening.url())
        async for group in inbox:
            await outbox.send(group)


made: list[Announces] = []
longest = 64
"""Tokens of the longest sequence."""


def generator(cfg: Any, tokenizer: Any) -> PenstockGenerator:
    """Return the generator of the trainer, and put its stage into `made`."""
    gateway = AtroposGateway(
        batch_size=BATCH, max_token_len=longest + 1, capacity=2 * SLOTS, server=ServerConfig(port=0)
    )
    made.append(Announces(gateway))
    return PenstockGenerator(source(gateway).then(made[-1]), cfg, tokenizer)


def make_trainer(folder: Path) -> Any:
    """Return SkyRL's trainer, whose groups arrive."""
    options = {
        "trainer.max_prompt_length": 512,
        "generator.max_input_length": 512,
        "trainer.train_batch_size": PROMPTS,
        "trainer.policy_mini_batch_size": PROMPTS,
        "trainer.micro_train_batch_size_per_gpu": BATCH,
        "generator.n_samples_per_prompt": GROUP,
    }
    model, data = write_model(folder / "model"), write_prompts(folder / "prompts.jsonl", PROMPTS)
    return trainer_of(config_of(model, data, folder, **options), f"{generator.__module__}:generator")


@contextmanager
def senders(url: str, way: str, groups: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the workers, which end when their input does; yield them."""
    started = []
    for number in range(WORKERS):
        hashes = str(folder / f"hashes_{number}")
        arguments = [url, way, str(groups // WORKERS), str(longest), str(number), hashes]
        command = [PYTHON, "-m", "tests.atropos_skyrl_real.stress_sender", *arguments]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=offline()))
    try:
        yield started
    finally:
        for each in started:
            each.communicate()


class Receiver:
    """SkyRL's side: batches become tensors, and are committed."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.hashes: list[bytes] = []
        utils = importlib.import_module("skyrl.train.generators.utils")
        backend = importlib.import_module("skyrl.backends.skyrl_train.inference_servers.engine_utils")
        sampling = backend.get_sampling_params_for_backend("vllm", trainer.cfg.generator.sampling_params)
        row = {"prompt": [{"role": "user", "content": "-"}], "env_class": "atropos", "env_extras": {}}
        rows = [row | {"uid": str(number)} for number in range(PROMPTS)]
        self._asked, self._uids = utils.prepare_generator_input(rows, GROUP, sampling, "atropos", "train", 1)

    async def batch(self, *, hashed: bool) -> None:
        """Take one batch up to the optimizer step."""
        output = await self.trainer.generate(self._asked)
        reasons = output["stop_reasons"]
        output, uids = self.trainer.postprocess_generator_output(output, list(self._uids))
        data = self.trainer.convert_to_training_input(output, uids)
        if hashed:
            rows = zip(*(data[name].numpy() for name in TENSORS), strict=True)
            self.hashes += [digest(*unpadded(row), reason) for row, reason in zip(rows, reasons, strict=True)]
        self.trainer.global_step += 1
        await self.trainer.dispatch.save_weights_for_sampler()


async def begun(trainer: Any) -> str:
    """Start the flow; return the URL of its gateway."""
    await asyncio.to_thread(trainer.generator.training.begin, fully_async=False)
    trainer.init_weight_sync_state()
    await trainer.dispatch.save_weights_for_sampler()
    return await asyncio.wrap_future(made[-1].url)


async def received(way: str, samples: int, folder: Path, *, hashed: bool) -> dict[str, Any]:
    """Measure a case of `samples`."""
    trainer = make_trainer(folder)
    receiver, url = Receiver(trainer), await begun(trainer)
    with senders(url, way, samples // GROUP, folder):
        await receiver.batch(hashed=hashed)  # the workers have started
        began, cpu = time.monotonic(), time.process_time()
        for _ in range(samples // BATCH - 1):
            await receiver.batch(hashed=hashed)
        took, spent = time.monotonic() - began, time.process_time() - cpu
        memory = psutil.Process().memory_info().rss
        await asyncio.to_thread(trainer.generator.training.end)
    balance = trainer.generator.report.balance
    found = {"samples": samples, "a_second": (samples - BATCH) / took, "trained": balance.ended["trained"]}
    found |= {"cpu_us": 1e6 * spent / (samples - BATCH), "rss_mib": memory / 2**20, "balanced": balance.balanced}
    return found | (compared(receiver.hashes, folder) if hashed else {})


def compared(hashes: Sequence[bytes], folder: Path) -> dict[str, Any]:
    """Compare the hashes of the tensors with those of the workers."""
    sent = b"".join(path.read_bytes() for path in sorted(folder.glob("hashes_*")))
    ours, theirs = (np.sort(np.frombuffer(each, f"V{HASH_BYTES}").view(np.uint64)) for each in (b"".join(hashes), sent))
    same = np.array_equal(ours, theirs)
    return {"hashes": len(ours), "distinct": len(np.unique(ours)), "equal_to_those_sent": same}


async def slots(folder: Path) -> dict[str, Any]:
    """Measure the memory of groups that wait, because SkyRL asks for none."""
    trainer = make_trainer(folder)
    url = await begun(trainer)
    before = psutil.Process().memory_full_info()
    with senders(url, "shm", SLOTS, folder):
        async with aiohttp.ClientSession() as session:
            while (waiting := await accepted(session, url)) < SLOTS:  # noqa: ASYNC110
                await asyncio.sleep(0.2)  # the gateway has no event for it
        after = psutil.Process().memory_full_info()
        await asyncio.to_thread(trainer.generator.training.end)
    token_bytes = 3 * longest / 4 * (4 + 1 + 4)  # the mean length; token, mask and log-probability
    private, resident = after.uss - before.uss, after.rss - before.rss
    found = {"waiting": waiting, "private_mib": private / 2**20, "shared_mib": (resident - private) / 2**20}
    return found | {"payload_mib": SLOTS * GROUP * token_bytes / 2**20}


async def accepted(session: aiohttp.ClientSession, url: str) -> int:
    """Return the number of groups that the gateway has accepted."""
    async with session.get(f"{url}/status") as response:
        environments = (await response.json())["environments"]
    return sum(int(each["submitted"]) for each in environments) // GROUP


def held(inside: bool, folder: Path) -> dict[str, Any]:  # noqa: FBT001
    """Measure the trainer's process with a larger model, and an engine of its own beside it or none."""
    model = write_letters(folder / "model", width=1024, layers=8)
    cfg = config_of(model, write_letter_prompts(folder / "prompts.jsonl"), folder)
    trainer = trainer_of(cfg, f"{generator.__module__}:generator")
    engine = InProcess(str(model), trainer.tokenizer) if inside else None
    parameters = sum(each.numel() for each in trainer.dispatch.model.parameters())
    return {"parameters": parameters, "rss_mib": psutil.Process().memory_info().rss / 2**20, "engine": repr(engine)}


def run(case: str, samples: int) -> dict[str, Any]:
    """Measure a case in this process."""
    logging.disable(logging.INFO)
    importlib.import_module("loguru").logger.disable("skyrl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case in {"inside", "outside"}:
            return held(case == "inside", folder)
        if case == "slots":
            return asyncio.run(slots(folder))
        return asyncio.run(received("http" if case == "http" else "shm", samples, folder, hashed=case == "hashed"))


def main() -> None:
    """Measure all cases, and print what each has found."""
    cases = {"hashed": 1_000_000, "shm": 100_000, "http": 20_000, "slots": 0, "inside": 0, "outside": 0}
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=cases, help="this one alone, in this process")
    parser.add_argument("--samples", type=int, help="of --case; a multiple of 4,000")
    parser.add_argument("--tokens", type=int, default=64, help="of the longest sequence")
    options = parser.parse_args()
    global longest  # noqa: PLW0603 (read by the generator that SkyRL makes by its name)
    longest = options.tokens
    if options.case is not None:
        found = run(options.case, options.samples or cases[options.case])
        print(PREFIX + json.dumps(found), flush=True)  # noqa: T201 (read below)
        return
    for case in cases:
        command = [sys.executable, "-m", "tests.atropos_skyrl_real.stress", "--case", case]
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        lines = [line.removeprefix(PREFIX) for line in ran.stdout.splitlines() if line.startswith(PREFIX)]
        print(case, *lines or [ran.stderr[-3000:]], flush=True)  # noqa: T201 (a case takes minutes)


if __name__ == "__main__":
    main()
