"""SkyRL's sampling parameters, in vLLM's form, as those of penstock's policies.

Read off skyrl 0.4.0: backends/skyrl_train/inference_servers/engine_utils.py:55-82.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...._schemas import InvalidConfig
from ...contracts.sampling_params import SamplingParams

SAME = {"temperature", "top_p", "min_p", "repetition_penalty", "seed"}
"""Parameters that have one name and one meaning."""

IGNORED = {"skip_special_tokens", "include_stop_str_in_output", "logprobs"}
"""Options of vLLM's output that change no token and no log-probability here."""

NAMES = {"max_tokens": "max_completion_tokens", "top_k": "top_k", "stop": "stop", "stop_token_ids": "stop_ids"}
"""Parameters with another name or another type."""

MEANINGLESS = (("min_tokens", 1), ("top_k", -1), ("top_k", 0))
"""Values without effect: a completion has a token in any case, and no bound on the candidates."""


def sampling_of(params: Mapping[str, Any]) -> SamplingParams:
    """Return SkyRL's sampling parameters, in vLLM's form, as those of penstock.

    >>> sampling_of({"max_tokens": 64, "temperature": 0.0, "top_k": -1, "stop": None}).greedy
    True

    Raises:
        InvalidConfig: there is no such parameter, or a value is out of range.
    """
    given = {name: value for name, value in params.items() if value is not None and name not in IGNORED}
    given = {name: value for name, value in given.items() if (name, value) not in MEANINGLESS}
    if unknown := sorted(given.keys() - SAME - NAMES.keys()):
        raise InvalidConfig(
            f"generator.sampling_params: expected parameters that penstock's policies have, got {unknown[0]}="
            f"{given[unknown[0]]!r}"
        )
    found: dict[str, Any] = {NAMES.get(name, name): value for name, value in given.items()}
    if "stop" in found:
        found["stop"] = tuple(found["stop"])
    if not found.get("temperature", 1.0):
        found |= {"temperature": 1.0, "greedy": True}
    return SamplingParams(**found)
