import pytest
import torch
from tests.tiny_model import TinyModel

from penstock.torch import Attention, CausalModel, KVCache, positions_of


def everything(rows: int, length: int) -> torch.Tensor:
    return torch.ones(rows, length, dtype=torch.bool)


@torch.inference_mode()
def test_tokens_fed_one_by_one_through_the_cache_give_the_logits_of_one_pass() -> None:
    model: CausalModel = TinyModel()
    tokens, mask = torch.tensor([[1, 2, 3, 4, 5]]), everything(1, 5)
    cache = model.new_cache(1, 5)

    whole = model(tokens, positions=positions_of(mask), attend=Attention.causal(mask))
    steps = [
        model(
            tokens[:, t : t + 1],
            positions=torch.tensor([[t]]),
            attend=Attention.causal(everything(1, t + 1), 1),
            cache=cache,
        )
        for t in range(5)
    ]

    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_padding_on_the_left_changes_no_logit() -> None:
    model = TinyModel()
    tokens, mask = torch.tensor([[0, 0, 1, 2, 3]]), torch.tensor([[False, False, True, True, True]])

    padded = model(tokens, positions=positions_of(mask), attend=Attention.causal(mask))
    bare = model(tokens[:, 2:], positions=torch.arange(3)[None], attend=Attention.causal(everything(1, 3)))

    torch.testing.assert_close(padded[:, 2:], bare, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_packed_sequences_give_the_logits_they_give_alone() -> None:
    model = TinyModel()
    tokens, sequences = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 1, 1, 1]])

    packed = model(tokens, positions=torch.tensor([[0, 1, 0, 1, 2]]), attend=Attention.packed(sequences))
    alone = model(tokens[:, 2:], positions=torch.arange(3)[None], attend=Attention.causal(everything(1, 3)))

    torch.testing.assert_close(packed[:, 2:], alone, atol=1e-5, rtol=0)


def test_every_token_sees_at_least_itself() -> None:
    mask = torch.tensor([[False, False, True], [True, False, False]])

    assert Attention.causal(mask).mask.diagonal(dim1=1, dim2=2).all()


def test_kept_rows_keep_their_keys() -> None:
    cache = KVCache(layers=1, batch=3, heads=1, capacity=4, width=2)
    keys = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, 2)
    cache.append(0, keys, keys)

    cache.keep(torch.tensor([2, 0]))
    seen, _ = cache.append(0, torch.full((2, 1, 1, 2), 9.0), torch.zeros(2, 1, 1, 2))

    assert seen[:, 0, :, 0].tolist() == [[2, 9], [0, 9]]
    assert repr(cache) == "<KVCache: 2 rows, 2 of 4 tokens>"


def test_a_full_cache_is_an_error_with_its_capacity() -> None:
    cache = KVCache(layers=1, batch=1, heads=1, capacity=2, width=2)

    with pytest.raises(
        ValueError, match=r"at most 2 more tokens of <KVCache: 1 rows, 0 of 2 tokens>, got \(1, 1, 3, 2\)"
    ):
        cache.append(0, torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2))


@torch.inference_mode()
def test_rows_that_joined_a_cache_and_were_cut_have_the_logits_of_rows_alone() -> None:
    model = TinyModel()
    rows = [torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), torch.tensor([9, 8, 7, 6])]
    cache, other = model.new_cache(1, 8), model.new_cache(1, 4)
    for each, tokens, count in ((cache, rows[0], 5), (other, rows[1], 1)):
        mask = everything(1, count)
        model(tokens[None, :count], positions=positions_of(mask), attend=Attention.causal(mask), cache=each)

    cache.join(other)

    assert (cache.batch, cache.length, cache.capacity) == (2, 5, 8)
    visible = torch.tensor([[True] * 8, [False] * 4 + [True] * 4])
    found = []
    for step in range(2):
        chosen = torch.stack([rows[0][5 + step], rows[1][1 + step]])[:, None]
        positions, attend = torch.tensor([[5 + step], [1 + step]]), Attention.causal(visible[:, : 6 + step], 1)
        found.append(model(chosen, positions=positions, attend=attend, cache=cache))
    cache.keep(torch.tensor([1]))
    cache.cut(4)
    assert (cache.batch, cache.length, cache.capacity) == (1, 3, 4)
    attend = Attention.causal(everything(1, 4), 1)
    last = model(rows[1][None, 3:], positions=torch.tensor([[3]]), attend=attend, cache=cache)
    whole = [
        model(row[None], positions=torch.arange(len(row))[None], attend=Attention.causal(everything(1, len(row))))[0]
        for row in rows
    ]
    torch.testing.assert_close(torch.cat([each[0] for each in found]), whole[0][5:7], atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat([each[1] for each in found]), whole[1][1:3], atol=1e-5, rtol=0)
    torch.testing.assert_close(last[0], whole[1][3:], atol=1e-5, rtol=0)
