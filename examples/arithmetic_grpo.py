"""A complete run: two worker processes sample a small transformer on sums, and a trainer updates it.

    python examples/arithmetic_grpo.py --seed 3

Problems and scores come from reasoning-gym. After a few seconds of supervised training, the policy solves about a third
of the held-out problems; reinforcement learning raises this above 90 %. The workers receive every new version of the
weights through shared memory while they sample. Ctrl-C ends the run early and keeps its results.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # before the imports below, which take seconds
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process at once: there are no results yet

import argparse
import sys
from functools import partial
from pathlib import Path

import anyio
import torch

from arithmetic.exam import ExaminedTrainer
from arithmetic.model import make_model
from arithmetic.optimizer import annealed_adamw
from arithmetic.results import kept
from arithmetic.run import Run
from arithmetic.task import LONGEST_ANSWER, TrainingProblems
from arithmetic.tokenizer import TOKENIZER
from arithmetic.warm_up import warm_up
from penstock import AdvantageNormalizer, Batcher, RewardBridge, SinkTrainer, SourceEnv, processes, source
from penstock.policies import SamplingParams
from penstock.torch import TorchPolicy, TorchTrainer
from penstock.weights import WeightPublisher

STEPS, TARGET, TIME_LIMIT_S, START_TIMEOUT_S = 250, 0.98, 100.0, 300.0
REWARD = Path(__file__).parent / "arithmetic" / "reward.yaml"


async def reinforce(run: Run) -> None:
    """Train `run.model` until it solves enough held-out problems, or the steps or the time are used up.

    The time counts from the first step: on a busy machine the workers may take minutes to start.
    """
    trainer = ExaminedTrainer(TorchTrainer(run.model, optimizer=partial(annealed_adamw, steps=STEPS)), run.model)
    async with WeightPublisher(run.model) as publisher:
        policy = TorchPolicy(make_model, weights=publisher.url, seed=run.seed)
        make_env = partial(TrainingProblems, run.seed)
        sampling = SamplingParams(max_completion_tokens=LONGEST_ANSWER)
        env = SourceEnv(make_env, policy, TOKENIZER, sampling=sampling, concurrency=256)
        run.pipeline = (
            source(env, on=processes(2, start_timeout_s=START_TIMEOUT_S), max_lag=2)
            .then(RewardBridge.from_yaml(REWARD))
            .then(AdvantageNormalizer("grpo"))
            .then(Batcher(max_tokens=8192, sequences=512, drop_zero_variance=True))
            .sink(SinkTrainer(trainer, publisher, max_steps=STEPS))
        )
        with anyio.CancelScope() as limit:
            run.stop_at(TARGET, limit)
            run.stop_after(TIME_LIMIT_S, limit)
            await run.pipeline.run(metrics=run.metrics, view="auto")
            run.end("all steps done")
        run.end("out of time")


async def main(seed: int) -> None:
    """Warm up, reinforce, and save the results."""
    torch.manual_seed(seed)
    with kept(Run(seed, make_model())) as run:
        await warm_up(run.model, seed)
        run.warmed_up()
        print(f"reinforcement from {run.accuracy:.1%} of the held-out problems")
        await reinforce(run)
    if not run.steps:
        sys.exit("expected at least one optimizer step, got none: the policy is as it was after the warm-up")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Reinforcement learning on sums, in three processes.")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, problems and sampling")
    seed = parser.parse_args().seed
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        anyio.run(main, seed)
    except KeyboardInterrupt:  # outside the pipeline's run, which ends by itself
        sys.exit(130)
