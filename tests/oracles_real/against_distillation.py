"""Distillation beside the code of the peers: values of tokens, and gradients by the logits of the policy.

`make test-oracles` runs this file.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.oracles_real import of_trl, of_verl
from tests.oracles_real.release import Release
from tests.stages.losses.scoring import scored, slope
from torch import Tensor

from penstock.losses import Distillation, SampledDistillation, Term

TOKENS, VOCABULARY, CANDIDATES = 7, 13, 4

LOSSES = "trl.experimental.sdpo.loss_utils"


def logits(seed: int) -> Tensor:
    """Return [T, V] logits."""
    random = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(TOKENS, VOCABULARY, generator=random, dtype=torch.float64)


def candidates(policy: Tensor, teacher: Tensor, chosen_by: str) -> tuple[Tensor, Tensor]:
    """Return [T, K] the likeliest tokens of the teacher or the policy, or all, and the teacher's log-probabilities."""
    if chosen_by == "all":
        ids = torch.arange(VOCABULARY).expand(TOKENS, -1)
    else:
        ids = (teacher if chosen_by == "teacher" else policy).topk(CANDIDATES).indices
    return ids, torch.log_softmax(teacher, -1).gather(-1, ids)


def ours(term: Term, policy: Tensor, teacher: Tensor, chosen_by: str) -> Tensor:
    """Return [T] the values of a term; the tokens are 0, 1, 2 and so on."""
    predicted, tokens = torch.log_softmax(policy, -1), torch.arange(TOKENS)
    ids, logprobs = candidates(policy.detach(), teacher, chosen_by)
    columns: dict[str, Any] = {
        "predicted": predicted,
        "tokens": tokens,
        "teacher_ids": ids,
        "teacher_logprobs": logprobs,
    }
    return term.per_token(scored(predicted[tokens, tokens], torch.ones(TOKENS), **columns)).values


def verl_topk(policy: Tensor, teacher: Tensor, *, chunked: bool = False) -> Tensor:
    """Return `compute_forward_kl_topk`, which is of float32."""
    ids, logprobs = candidates(policy, teacher, "teacher")
    ragged = [torch.nested.nested_tensor_from_jagged(each, torch.tensor([0, 3, TOKENS])) for each in (logprobs, ids)]
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None, use_chunked_topk=chunked))
    found: Any = of_verl.VERL.get("verl.trainer.distillation.fsdp.losses", "compute_forward_kl_topk")(
        policy[None], *ragged, config, "thd"
    )
    values: Tensor = (found["distillation_losses"] if isinstance(found, dict) else found[0])[0]
    return values


def trl_topk(alpha: float, *, tail: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `compute_topk_self_distillation_loss`."""
    options = {"distillation_topk": CANDIDATES, "distillation_alpha": alpha, "distillation_add_tail": tail}
    return lambda policy, teacher: of_trl.TRL.get(LOSSES, "compute_topk_self_distillation_loss")(
        policy, teacher, **options
    )


def trl_whole(alpha: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `compute_full_logit_self_distillation_loss`."""
    return lambda policy, teacher: of_trl.TRL.get(LOSSES, "compute_full_logit_self_distillation_loss")(
        policy, teacher, distillation_alpha=alpha
    )


def trl_sampled(policy: Tensor, teacher: Tensor) -> Tensor:
    """Return `compute_sampled_token_self_distillation_loss`."""
    sampled: Tensor = of_trl.TRL.get(LOSSES, "compute_sampled_token_self_distillation_loss")(
        policy[None], teacher[None], torch.arange(TOKENS)[None], distillation_alpha=1.0
    )
    return sampled[0]


def trl_jsd(beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `generalized_jsd_loss` of each token."""
    return lambda policy, teacher: torch.stack(
        [
            of_trl.TRL.get("trl.experimental.gkd.gkd_trainer", "GKDTrainer").generalized_jsd_loss(
                policy[None, [token]], teacher[None, [token]], beta=beta, reduction="sum"
            )
            for token in range(TOKENS)
        ]
    )


ROWS: list[tuple[Release, str, Term, str, Callable[[Tensor, Tensor], Tensor]]] = [
    (of_verl.VERL, "compute_forward_kl_topk", Distillation("forward_kl", "raw"), "teacher", verl_topk),
    (
        of_verl.VERL,
        "compute_forward_kl_topk chunked",
        Distillation("forward_kl", "raw"),
        "teacher",
        lambda policy, teacher: verl_topk(policy, teacher, chunked=True),
    ),
    (of_trl.TRL, "topk forward", Distillation("forward_kl", "renormalised"), "policy", trl_topk(0.0, tail=False)),
    (of_trl.TRL, "topk reverse", Distillation("reverse_kl", "renormalised"), "policy", trl_topk(1.0, tail=False)),
    (of_trl.TRL, "topk jsd", Distillation("jsd", "renormalised", 0.3), "policy", trl_topk(0.3, tail=False)),
    (of_trl.TRL, "topk tail forward", Distillation("forward_kl", "tail"), "policy", trl_topk(0.0, tail=True)),
    (of_trl.TRL, "topk tail reverse", Distillation("reverse_kl", "tail"), "policy", trl_topk(1.0, tail=True)),
    (of_trl.TRL, "topk tail jsd", Distillation("jsd", "tail", 0.3), "policy", trl_topk(0.3, tail=True)),
    (of_trl.TRL, "full logits forward", Distillation("forward_kl", "raw"), "all", trl_whole(0.0)),
    (of_trl.TRL, "full logits reverse", Distillation("reverse_kl", "tail"), "all", trl_whole(1.0)),
    (of_trl.TRL, "full logits jsd", Distillation("jsd", "renormalised", 0.5), "all", trl_whole(0.5)),
    (of_trl.TRL, "sampled token", SampledDistillation(), "all", trl_sampled),
    (of_trl.TRL, "generalized_jsd_loss forward", Distillation("forward_kl"), "all", trl_jsd(0.0)),
    (of_trl.TRL, "generalized_jsd_loss reverse", Distillation("reverse_kl"), "all", trl_jsd(1.0)),
    (of_trl.TRL, "generalized_jsd_loss", Distillation("jsd", beta=0.3), "all", trl_jsd(0.3)),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("term", "chosen_by", "peer"), [pytest.param(*row[2:], id=f"{row[0]}: {row[1]}") for row in ROWS]
)
def test_distillation_has_the_values_and_the_gradient_of_the_peer(
    term: Term, chosen_by: str, peer: Callable[[Tensor, Tensor], Tensor], seed: int
) -> None:
    policy, teacher = logits(seed).requires_grad_(), logits(seed + 10)

    found, expected = ours(term, policy, teacher, chosen_by), peer(policy, teacher)

    close = 1e-6 if expected.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, expected, rtol=close, atol=close, check_dtype=False)
    torch.testing.assert_close(slope(found.sum(), policy), slope(expected.sum(), policy), rtol=close, atol=close)
