from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.schemas import Array, InvalidRecord, StopReason, TrajectoryGroup


def built(**changed: Any) -> TrajectoryGroup:
    """Two sequences, of 3 and 4 tokens, with whatever columns `changed` says."""
    columns: dict[str, Any] = {
        "env": "test",
        "instance_id": "0",
        "tokens": [1, 2, 3, 4, 5, 6, 7],
        "offsets": [0, 3, 7],
        "loss_mask": [0, 1, 1, 0, 0, 1, 1],
        "rewards": [1.0, 0.0],
    }
    return TrajectoryGroup.build(**(columns | changed))


def complete(seed: int = 0, lengths: tuple[int, ...] = (3, 4), *, versions_by_token: bool = False) -> TrajectoryGroup:
    """A group with every column there is."""
    random = np.random.default_rng(seed)
    count, total = len(lengths), sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    first = offsets[:-1][np.diff(offsets) > 0]
    mask = random.random(total) < 0.5
    mask[first] = False

    def floats(*shape: int) -> Array:
        return random.standard_normal(shape).astype(np.float32)

    return TrajectoryGroup.build(
        env="test",
        instance_id=str(seed),
        tokens=random.integers(0, 2**31 - 1, total, np.int32),
        offsets=offsets,
        loss_mask=mask,
        rewards=floats(count),
        policy_versions=random.integers(0, 2**40, total if versions_by_token else count),
        stop_reasons=random.integers(0, len(StopReason), count).astype(np.uint8),
        repetition_ids=random.permutation(count),
        behavior_logprobs=floats(total),
        token_rewards=floats(total),
        advantages=floats(total),
        ref_logprobs=floats(total),
        teacher_ids=random.integers(-1, 1000, (total, 3), np.int32),
        teacher_logprobs=floats(total, 3),
        reward_parts={"score": floats(count), "format": floats(count)},
        meta={"messages": [{"role": "user", "content": "1 + 1"}], "temperature": 0.7, "nothing": None},
    )


def assert_same(left: TrajectoryGroup, right: TrajectoryGroup) -> None:
    assert (left.env, left.instance_id, left.meta) == (right.env, right.instance_id, right.meta)
    ours, theirs = left.columns(), right.columns()
    assert list(ours) == list(theirs)
    for name, column in ours.items():
        assert column.dtype == theirs[name].dtype
        assert column.shape == theirs[name].shape
        assert column.tobytes() == theirs[name].tobytes()


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [b"", b"\xc1", msgspec.msgpack.encode(("env", 1, {})), msgspec.msgpack.encode([])])
def test_a_header_that_makes_no_group_is_refused(header: bytes) -> None:
    with pytest.raises(InvalidRecord, match="header: expected"):
        TrajectoryGroup.assemble(header, built().columns())
