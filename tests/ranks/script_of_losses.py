"""Two ranks train with every loss, those of FSDP2 with such as see the whole batch, beside a single process.

    python -m tests.ranks.script_of_losses FOLDER

What rank 0 found is written to FOLDER/<kind>-<name>.json.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tests.ranks.script_of_ranks import SGD, ddp, ended_ranks, fsdp, listed, made, plain, start
from tests.stages.losses.scoring import LOSSES as OF_TOKENS
from tests.tiny_model import ReadModel
from torch.distributed.fsdp import OffloadPolicy

from penstock import TrainBatch
from penstock.losses import (
    AdaptiveEntropy,
    AdaptiveKL,
    AdvantageWeighted,
    ClipCov,
    Distillation,
    Entropy,
    KLCov,
    Loss,
    PPOClip,
    SampledDistillation,
    TopEntropyMask,
)
from penstock.torch import RankedTrainer, TorchTrainer

VOCABULARY = 11
STEPS = 3

OF_THE_BATCH: list[Loss] = [
    ClipCov(share=0.2, least=0.0),
    KLCov(share=0.2),
    PPOClip() * TopEntropyMask(0.3),
    (ClipCov(share=0.1, least=-1.0) * TopEntropyMask(0.5) + KLCov(share=0.3)).aggregated("seq-mean-token-mean"),
    PPOClip() + AdaptiveEntropy(2.39, weight=0.01, delta=0.02),
    PPOClip() + AdaptiveKL(0.1, 0.01, horizon=10),
    SampledDistillation() + 0.1 * Entropy(),
    AdvantageWeighted() + 0.5 * Distillation("jsd", mode="renormalised", beta=0.3),
    Distillation("forward_kl", mode="tail") - 0.1 * Entropy(),
]
"""Losses with a state, a choice among all tokens, or a teacher."""

LOSSES = [*OF_TOKENS, *OF_THE_BATCH]

RESTRICTED: list[Loss] = [AdvantageWeighted() - 0.1 * Entropy(), *OF_TOKENS[-3:], *OF_THE_BATCH[:4]]
"""Losses of batches that have supports."""

KINDS: dict[str, list[Loss]] = {
    "ddp": LOSSES,
    "fsdp": OF_THE_BATCH,
    "ddp-supports": RESTRICTED,
    "fsdp-supports": RESTRICTED,
}


def batch_of(seed: int, *, supports: bool) -> TrainBatch:
    """Return a batch with the columns of a teacher, or with those tokens that each was drawn from."""
    numbers, packed = np.random.default_rng(seed + 90), made(seed)
    count, trains = len(packed.tokens), packed.loss_mask
    ids = np.stack([numbers.choice(VOCABULARY, 4, replace=False) for _ in range(count)]).astype(np.int32)
    tokens = np.where(trains, ids[:, 0], packed.tokens).astype(np.int32)
    if supports:
        ids[::3, 2:] = -1
        return msgspec.structs.replace(packed, tokens=tokens, support_ids=np.where(trains[:, None], ids, -1))
    teacher = np.log(numbers.dirichlet(np.ones(5), count)[:, :4]).astype(np.float32)
    return msgspec.structs.replace(packed, tokens=tokens, teacher_ids=ids, teacher_logprobs=teacher)


def trainer(model: Any, loss: Loss) -> TorchTrainer:
    """Return a trainer that keeps its own state of the loss."""
    own = copy.deepcopy(loss)
    return TorchTrainer(model, optimizer=SGD, loss=own, max_grad_norm=0.5, micro_batch_tokens=48, updates=2)


def train(losses: list[Loss], folder: Path, kind: str) -> None:
    """Train some steps with each loss; the leader does the same in a single process."""
    for number, loss in enumerate(losses):
        shared = fsdp(OffloadPolicy(), ReadModel()) if kind.startswith("fsdp") else ddp()
        with RankedTrainer(trainer(shared, loss)) as ranked:
            if not ranked.leads:
                ranked.follow()
                continue
            alone = trainer(ReadModel(), loss)
            batches = [batch_of(seed, supports="supports" in kind) for seed in range(STEPS)]
            found = {
                "steps": [(plain(alone.step(batch)), plain(ranked.step(batch))) for batch in batches],
                "weights": (listed(alone.weights()), listed(ranked.weights())),
            }
            (folder / f"{kind}-{number}.json").write_text(json.dumps(found))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    trainer(ReadModel(), LOSSES[0])  # what torch imports late, for all children
    pids = {
        (kind, rank): start(folder, kind, rank, 2, partial(train, losses))
        for kind, losses in KINDS.items()
        for rank in range(2)
    }
    codes = ended_ranks(pids)
    assert not any(codes.values()), codes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
