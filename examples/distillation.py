"""Distillation: a student learns from a teacher in far fewer steps than from rewards alone.

    python examples/distillation.py --seed 3

First a teacher is trained as in arithmetic_grpo.py. Two students then start with little skill. One is trained with
rewards. The other has no rewards: it samples its own completions, right and wrong, and learns the teacher's predictions
at every token. A step is a batch of 512 completions. Everything runs in one process, for some minutes.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from pathlib import Path

import anyio
import torch

from arithmetic.curve import printed_curve
from arithmetic.exam import ExaminedTrainer
from arithmetic.model import Transformer, make_model
from arithmetic.optimizer import annealed_adamw
from arithmetic.task import LONGEST_ANSWER, TrainingProblems
from arithmetic.tokenizer import TOKENIZER
from arithmetic.warm_up import warm_up
from penstock import AdvantageNormalizer, Batcher, RewardBridge, SinkTrainer, SourceEnv, Teacher, source
from penstock.losses import Distillation, PPOClip
from penstock.policies import SamplingParams
from penstock.torch import TorchPolicy, TorchTeacher, TorchTrainer
from penstock.weights import WeightPublisher

STEPS, STEPS_WITH_TEACHER, TARGET, LITTLE_SKILL = 250, 100, 0.95, 200
REWARD = Path(__file__).parent / "arithmetic" / "reward.yaml"


async def learn(name: str, model: Transformer, seed: int, teacher: Transformer | None = None) -> None:
    """Train `model` by its teacher, or else by rewards, and print its accuracy."""
    # The candidates of a teacher stay valid, so each batch gets four updates. With rewards that would be too many.
    steps, updates = (STEPS_WITH_TEACHER, 4) if teacher else (STEPS, 1)
    optimizer = partial(annealed_adamw, steps=steps * updates)
    loss = Distillation() if teacher else PPOClip()
    trainer = TorchTrainer(model, optimizer=optimizer, loss=loss, updates=updates)
    with printed_curve(name, model, TARGET) as metrics:
        async with WeightPublisher(model) as publisher:
            policy = TorchPolicy(make_model, weights=publisher.url, seed=seed)
            make_env = partial(TrainingProblems, seed)
            sampling = SamplingParams(max_completion_tokens=LONGEST_ANSWER)
            env = partial(SourceEnv, make_env, policy, TOKENIZER, sampling=sampling, concurrency=256)
            if teacher:  # groups of one: completions are not compared
                policy_of_teacher = TorchTeacher(partial(copy.deepcopy, teacher), TOKENIZER)
                teacher_stage = Teacher(policy_of_teacher, top_k=4, concurrency=256)
                judged = source(env(group_size=1), max_lag=2).then(teacher_stage)
            else:
                bridge = RewardBridge.from_yaml(REWARD)
                judged = source(env(group_size=8), max_lag=2).then(bridge).then(AdvantageNormalizer("grpo"))
            batches = judged.then(Batcher(max_tokens=8192, sequences=512, drop_zero_variance=True))
            sink = SinkTrainer(ExaminedTrainer(trainer, model, every=5), publisher, max_steps=steps)
            await batches.sink(sink).run(metrics=metrics)


async def main(seed: int) -> None:
    """Train a teacher, then two students with the same initial weights."""
    torch.manual_seed(seed)
    teacher, student = make_model(), make_model()
    await warm_up(teacher, seed)
    await warm_up(student, seed, LITTLE_SKILL)
    await learn("the teacher, by reinforcement", teacher, seed)
    await learn("a student, by distillation", copy.deepcopy(student), seed, teacher)
    await learn("the same student, by reinforcement alone", student, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A teacher, and two students with the same initial weights.")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, problems and sampling")
    anyio.run(main, parser.parse_args().seed)
