"""The advantage estimator `penstock` of verl: the advantages of the flow, token by token.

verl's trainer gives an estimator scores, masks and the field `uid` of each row (`compute_advantage`,
trainer/ppo/ray_trainer.py:249). Under this estimator `uid` is the key of the row; its advantages lie in TransferQueue.
"""

from __future__ import annotations

from typing import Any

from ..interface import object_in
from .transfer_queue import PARTITION

ESTIMATOR = "penstock"
"""Its name in `algorithm.adv_estimator`."""


def register_estimator() -> None:
    """Register the estimator with verl in this process.

    Raises:
        MissingInterface: verl has no registry of estimators.
    """
    object_in("verl", "verl.trainer.ppo.core_algos", "register_adv_est")(ESTIMATOR)(flow_advantages)


def flow_advantages(
    token_level_rewards: Any,
    response_mask: Any,
    index: Any,
    config: Any = None,  # noqa: ARG001 (as above)
    **_: Any,
) -> tuple[Any, Any]:
    """Return the advantages of the flow [B, R], twice: verl wants returns too. 0 where `response_mask` is 0.

    Args:
        token_level_rewards: not used.
        response_mask: [B, R] 1 on the tokens that train.
        index: [B] the key of each row. Rows that verl has made itself, to fill a batch, have no token that trains.
        config: not used.
    """
    advantages = response_mask.new_zeros(response_mask.shape, dtype=token_level_rewards.dtype)
    rows = [row for row, trains in enumerate(response_mask.any(-1).tolist()) if trains]
    kv_batch_get = object_in("verl", "transfer_queue", "kv_batch_get")
    keys = [str(index[row]) for row in rows]
    found = kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["advantages"])["advantages"]
    for row, column in zip(rows, found, strict=True):
        advantages[row, : len(column)] = column
    advantages = advantages * response_mask
    return advantages, advantages
