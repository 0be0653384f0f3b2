from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock import TrainBatch
from penstock._stages.training.shares import decode_share, encode_share, owners_of, shares
from penstock.testing import batch, group


@given(st.lists(st.integers(0, 500), max_size=40), st.integers(1, 8))
def test_no_rank_has_more_than_another_by_more_than_a_group(tokens: list[int], count: int) -> None:
    taken = owners_of(np.array(tokens, np.int64), count)

    loads = np.bincount(taken, tokens, minlength=count) if tokens else np.zeros(count)
    assert loads.max() - loads.min() <= max(tokens, default=0)
    assert len(taken) == len(tokens)


def made() -> TrainBatch:
    lengths = {"a": [4, 2, 9], "b": [1], "c": [30, 3]}
    packed = TrainBatch.pack(group(instance_id=name, completion_lengths=each) for name, each in lengths.items())
    return msgspec.structs.replace(packed, advantages=np.arange(len(packed.tokens), dtype=np.float32))


@given(st.integers(1, 5))
def test_shares_are_the_groups_of_the_batch_again_and_keep_its_totals(count: int) -> None:
    whole = made()

    made_shares, owners = shares(whole, count)
    divided = [decode_share(encode_share(share)) for share in made_shares]

    assert len(divided) == count
    assert [np.array_equal(share.tokens, whole.tokens[owners == rank]) for rank, share in enumerate(divided)] == [
        True
    ] * count
    assert sorted(of for share in divided for of in share.groups) == sorted(whole.groups)
    for share in divided:
        taken = np.isin([of.instance_id for of in whole.groups], [of.instance_id for of in share.groups])
        tokens = taken[whole.group_of_sequence()][whole.sequence_of_token()]
        assert share.loss_tokens == whole.loss_tokens
        assert share.loss_rollouts == whole.loss_rollouts
        assert share.loss_groups == whole.loss_groups
        assert share.total_rollouts == whole.total_rollouts
        for name in ("tokens", "loss_mask", "advantages"):
            assert np.array_equal(getattr(share, name), getattr(whole, name)[tokens])


def test_a_share_may_be_empty() -> None:
    (_, nothing), _ = shares(batch(groups=1), 2)
    nothing = decode_share(encode_share(nothing))

    assert (len(nothing), len(nothing.tokens), nothing.groups) == (0, 0, ())
