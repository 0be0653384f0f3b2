from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_model import TinyModel
from torch.nn.parallel import DistributedDataParallel

from penstock import TrainBatch
from penstock._stages.training.torch_ranks import decode_share, encode_share, owners
from penstock.losses import AdvantageWeighted
from penstock.testing import batch
from penstock.torch import RankedTrainer, TorchTrainer


@given(st.lists(st.integers(0, 500), max_size=40), st.integers(1, 8))
def test_no_rank_has_more_than_another_by_more_than_a_sequence(lengths: list[int], count: int) -> None:
    taken = owners(np.array(lengths, np.int64), count)

    loads = np.bincount(taken, lengths, minlength=count) if lengths else np.zeros(count)
    assert loads.max() - loads.min() <= max(lengths, default=0)
    assert len(taken) == len(lengths)


def made() -> TrainBatch:
    packed = batch(groups=3, completion_lengths=[4, 2, 9])
    return msgspec.structs.replace(packed, advantages=np.arange(len(packed.tokens), dtype=np.float32))


def test_shares_are_the_batch_again_and_keep_its_totals() -> None:
    whole = made()
    taken = owners(whole.lengths(), 2)

    shares = [decode_share(encode_share(whole.share(taken == rank))) for rank in range(2)]

    assert sorted(id_ for share in shares for id_ in share.ids) == sorted(whole.ids)
    for rank, share in enumerate(shares):
        tokens = (taken == rank)[whole.sequence_of_token()]
        assert share.loss_tokens == whole.loss_tokens
        assert share.loss_sequences == whole.loss_sequences
        assert share.loss_groups == whole.loss_groups
        assert share.total_sequences == whole.total_sequences
        assert {(group.id, group.loss_tokens) for group in share.groups} <= {
            (group.id, group.loss_tokens) for group in whole.groups
        }
        for name in ("tokens", "loss_mask", "advantages"):
            assert np.array_equal(getattr(share, name), getattr(whole, name)[tokens])


def test_ranks_that_share_a_prompt_add_up_to_the_mean_over_prompts() -> None:
    whole = made()
    taken = np.arange(len(whole)) % 2  # each rank has a part of every group

    def loss(packed: TrainBatch) -> float:
        trainer = TorchTrainer(
            TinyModel(vocabulary=1000), optimizer=torch.optim.AdamW, loss=AdvantageWeighted().aggregated("prompt-mean")
        )
        return trainer.step(packed)["loss"]

    assert sum(loss(whole.share(taken == rank)) for rank in range(2)) == pytest.approx(loss(whole), rel=1e-5)


def test_a_share_may_be_empty() -> None:
    nothing = decode_share(encode_share(made().share(np.zeros(9, np.bool_))))

    assert (len(nothing), len(nothing.tokens), nothing.groups) == (0, 0, ())


def test_a_model_that_is_not_shared_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="wrap it in DistributedDataParallel, or call fully_shard"):
        RankedTrainer(TorchTrainer(TinyModel(), optimizer=torch.optim.SGD))


def test_no_thread_of_a_rank_is_left_when_its_trainer_has_ended(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(TinyModel())
        with RankedTrainer(TorchTrainer(model, optimizer=torch.optim.AdamW)):
            assert "penstock rank" in {thread.name for thread in threading.enumerate()}

        assert "penstock rank" not in {thread.name for thread in threading.enumerate()}
    finally:
        dist.destroy_process_group()
