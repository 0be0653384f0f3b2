"""What servers of OpenAI's completions understand beyond those: what `HttpPolicy` asks of each, and how.

All of it is data. The endpoints are those that vLLM has where it is started with VLLM_SERVER_DEV_MODE=1, and SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

__all__ = ["SERVERS", "SIGNS", "Call", "Dialect", "KnownServer", "Server"]

KnownServer: TypeAlias = Literal["vllm", "sglang", "openai"]
"""Which server answers; `openai` is any other that speaks OpenAI's completions."""

Server: TypeAlias = KnownServer | Literal["auto"]
"""`auto` asks the server."""


class Sign(NamedTuple):
    """What only one kind of server answers."""

    path: str
    field: str
    """Of the JSON object that is answered."""
    server: KnownServer


SIGNS = (
    Sign("/model_info", "model_path", "sglang"),
    Sign("/get_model_info", "model_path", "sglang"),  # SGLang before 0.5
    Sign("/version", "version", "vllm"),
)
"""In the order in which a server is asked. One that answers none is `openai`."""


class Call(NamedTuple):
    """A request that is answered at once."""

    path: str
    body: Mapping[str, Any] = {}
    confirmed_by: tuple[str, str] | None = None
    """Where the server then says whether it did so: a path, and the field that is true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What one kind of server understands. What is None it has no word for."""

    sampling: dict[str, Any] = field(default_factory=dict)
    """Added to every request for completions: ids wanted, and nothing between the model and the sample. A server would
    otherwise take top_p, top_k and penalties from the model's own generation configuration."""
    tempered_logprobs: bool = False
    """Whether log-probabilities are those of the tempered distribution; else they are the model's own."""
    update: Callable[[str, int], list[Call]] | None = None
    """Loads the weights in a folder, of a version, and drops what was cached with those before."""
    pause: Call | None = None
    resume: Call | None = None
    untouched: frozenset[int] = frozenset({400, 401, 403, 404, 405, 422})
    """Statuses with which `update` is refused before any weights are loaded."""
    sleep: Call | None = None
    wake_up: Call | None = None
    settings: str | None = None
    """Where it can be read whether a server that sleeps gives memory back, as vLLM's `enable_sleep_mode`."""
    keeps_weights_asleep: bool = True
    """Whether a server that was woken has the weights that it went to sleep with."""
    version: str | None = None
    """Where the version of its weights can be read, as `weight_version`."""
    set_version: Callable[[int], Call] | None = None
    """Notes the version of its weights; None where `update` does."""
    needs: str = ""
    """What the server must have been started with to know all this."""


_UNALTERED = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def _update_vllm(folder: str, _: int) -> list[Call]:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    return [Call("/collective_rpc", reload), Call("/reset_prefix_cache")]


def _update_sglang(folder: str, version: int) -> list[Call]:
    files = {"model_path": folder, "weight_version": str(version), "flush_cache": True}
    return [Call("/update_weights_from_disk", files)]


def _version_vllm(version: int) -> Call:
    return Call("/update_weight_version", {"new_version": str(version)})


SERVERS: Mapping[KnownServer, Dialect] = {
    "vllm": Dialect(
        sampling=_UNALTERED | {"return_token_ids": True, "return_tokens_as_token_ids": True},
        update=_update_vllm,
        pause=Call("/pause?mode=wait"),
        resume=Call("/resume"),
        sleep=Call("/sleep?level=1", confirmed_by=("/is_sleeping", "is_sleeping")),
        settings="/server_info?config_format=json",
        wake_up=Call("/wake_up"),
        version="/weight_info",
        set_version=_version_vllm,
        needs="VLLM_SERVER_DEV_MODE=1, and --enable-sleep-mode for sleep",
    ),
    "sglang": Dialect(
        sampling=_UNALTERED | {"return_token_ids": True, "no_stop_trim": True},
        tempered_logprobs=True,
        update=_update_sglang,
        untouched=frozenset({401, 403, 404, 405, 422}),  # 400 also tells of weights that were loaded by half
        pause=Call("/pause_generation", {"mode": "retract"}),
        resume=Call("/continue_generation"),
        sleep=Call("/release_memory_occupation"),
        wake_up=Call("/resume_memory_occupation"),
        keeps_weights_asleep=False,
        version="/model_info",
        needs="--enable-memory-saver for sleep",
    ),
    "openai": Dialect(sampling={"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}),
}
