from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.tiny_model import TinyModel
from torch.nn.parallel import DistributedDataParallel

from penstock import TrainBatch
from penstock.losses import AdvantageWeighted
from penstock.testing import batch
from penstock.torch import RankedTrainer, TorchTrainer


def made() -> TrainBatch:
    packed = batch(groups=3, completion_lengths=[4, 2, 9])
    return msgspec.structs.replace(packed, advantages=np.arange(len(packed.tokens), dtype=np.float32))


def test_ranks_that_share_a_prompt_add_up_to_the_mean_over_prompts() -> None:
    whole = made()
    taken = np.arange(len(whole)) % 2  # each rank has a part of every group

    def loss(packed: TrainBatch) -> float:
        trainer = TorchTrainer(
            TinyModel(vocabulary=1000), optimizer=torch.optim.AdamW, loss=AdvantageWeighted().aggregated("prompt-mean")
        )
        return trainer.step(packed)["loss"]

    assert sum(loss(whole.share(taken == rank)) for rank in range(2)) == pytest.approx(loss(whole), rel=1e-5)


def test_a_model_that_is_not_shared_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="wrap it in DistributedDataParallel, or call fully_shard"):
        RankedTrainer(TorchTrainer(TinyModel(), optimizer=torch.optim.SGD))


def test_no_thread_of_a_rank_is_left_when_its_trainer_has_ended(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(TinyModel())
        with RankedTrainer(TorchTrainer(model, optimizer=torch.optim.AdamW)):
            assert {"penstock rank", "penstock pings"} <= {thread.name for thread in threading.enumerate()}

        assert not [each for each in set(threading.enumerate()) - before if each.name.startswith("penstock")]
    finally:
        dist.destroy_process_group()
