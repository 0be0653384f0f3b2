"""Requests beyond OpenAI's completions that `HttpPolicy` sends to each kind of server, as data.

The endpoints are those of SGLang, and of vLLM started with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from ..._schemas.errors import InvalidConfig
from ..contracts.sampling_params import SamplingParams

KnownServer: TypeAlias = Literal["vllm", "sglang", "openai"]
"""A kind of server; `openai` is any other with OpenAI's completions."""

Server: TypeAlias = KnownServer | Literal["auto"]
"""`auto` detects the kind."""


class Probe(NamedTuple):
    """A request that only one kind of server supports."""

    path: str
    field: str
    """Field of the JSON object in the response."""
    server: KnownServer


PROBES = (
    Probe("/model_info", "model_path", "sglang"),
    Probe("/get_model_info", "model_path", "sglang"),  # SGLang before 0.5
    Probe("/version", "version", "vllm"),
)
"""In the order of the attempts. A server without any of them is `openai`."""


class ServerCall(NamedTuple):
    """A request without a stream."""

    path: str
    body: Mapping[str, Any] = {}
    confirmed_by: tuple[str, str] | None = None
    """Path and field that report whether the request took effect; the field must be true."""


Alteration: TypeAlias = Literal["truncation", "repetition_penalty"]

_EVERY: frozenset[Alteration] = frozenset({"truncation", "repetition_penalty"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequests:
    """The requests of one kind of server; None for those that it lacks."""

    sampling: dict[str, Any] = field(default_factory=dict)
    """Added to every request for a completion: return ids, and do not change the model's distribution unless
    `SamplingParams` do. A server would otherwise take top_p, top_k and penalties from the model's generation
    configuration."""
    stops_at_ids: bool = True
    """True if it has `stop_token_ids`. At any other server a completion is cut where it arrives."""
    tempered_logprobs: bool = False
    """True if log-probabilities are those of the tempered distribution; else they are the model's own."""
    raw_logprobs_include: frozenset[Alteration] = _EVERY
    """Alterations that the server's log-probabilities include where they are not tempered."""
    tempered_logprobs_include: frozenset[Alteration] = _EVERY
    """Alterations that the server's log-probabilities include where they are tempered."""
    update: Callable[[str, int], list[ServerCall]] | None = None
    """Loads the weights of a version from a folder, and drops caches of earlier weights."""
    pause: ServerCall | None = None
    resume: ServerCall | None = None
    untouched: frozenset[int] = frozenset({400, 401, 403, 404, 405, 422})
    """Statuses of an `update` that is refused before any weights are loaded."""
    sleep: ServerCall | None = None
    wake_up: ServerCall | None = None
    settings: str | None = None
    """Path of the settings with vLLM's `enable_sleep_mode`; a server that lacks it keeps its memory while it sleeps."""
    keeps_weights_asleep: bool = True
    """True if a server keeps its weights while it sleeps."""
    version: str | None = None
    """Path of the version of its weights, in the field `weight_version`."""
    set_version: Callable[[int], ServerCall] | None = None
    """Sets the version of its weights; None if `update` does."""
    routing: Mapping[str, Any] | None = None
    """Added to a request whose answer shall have the experts of a mixture; see `http/routing_record.py`."""
    supports: bool = False
    """True if it returns the tokens that each was drawn from, those of `logprobs` the most probable that are finite,
    where log-probabilities are tempered."""
    needs: str = ""
    """Options that the server must be started with to support these requests."""

    def check(self, sampling: SamplingParams, server: KnownServer, *, tempered: bool) -> None:
        """Check that a server of this kind, with `tempered` log-probabilities or without, has what `sampling` needs.

        Raises:
            InvalidConfig: it lacks one.
        """
        for name in sorted(_changes(sampling).keys() - self.sampling.keys()):
            raise InvalidConfig(
                f"SamplingParams.{name}: expected its default at a server of kind {server}, which has no such "
                f"parameter, got {getattr(sampling, name)}: use vLLM or SGLang"
            )
        if sampling.support and not (tempered and self.supports):
            raise InvalidConfig(
                f"SamplingParams.keep_support: expected a server that returns the tokens it draws from, got {server}: "
                f"start vLLM with --logprobs-mode processed_logprobs --max-logprobs {sampling.support} and give "
                f"HttpPolicy(tempered_logprobs=True), or use TorchPolicy"
            )

    def body(self, sampling: SamplingParams) -> dict[str, Any]:
        """Return the parameters of a request for a completion."""
        body = self.sampling | {
            "max_tokens": sampling.max_completion_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.stop_ids and self.stops_at_ids:
            body["stop_token_ids"] = list(sampling.stop_ids)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.support:
            body["logprobs"] = sampling.support
        return body | _changes(sampling)

    def other_logprobs(self, sampling: SamplingParams, *, tempered: bool) -> str | None:
        """Return the difference of the server's log-probabilities to those of `Completion`; None if there is none."""
        included = self.tempered_logprobs_include if tempered else self.raw_logprobs_include
        if not tempered and sampling.logprob_temperature != 1:
            return "temperature is not 1, and the server's are not tempered"
        if sampling.truncates and not sampling.support and "truncation" in included:
            return "the server's are those after truncation"
        if sampling.repetition_penalty != 1 and "repetition_penalty" in included:
            return "the server's are those after the repetition penalty"
        return None


def _changes(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters that change the distribution; greedy sampling has no truncation."""
    names = ["repetition_penalty"] if sampling.greedy else ["top_p", "top_k", "min_p", "repetition_penalty"]
    return {name: value for name in names if (value := getattr(sampling, name)) != getattr(_DEFAULTS, name)}


_DEFAULTS = SamplingParams()


_UNALTERED = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def _update_vllm(folder: str, _: int) -> list[ServerCall]:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    return [ServerCall("/collective_rpc", reload), ServerCall("/reset_prefix_cache")]


def _update_sglang(folder: str, version: int) -> list[ServerCall]:
    files = {"model_path": folder, "weight_version": str(version), "flush_cache": True}
    return [ServerCall("/update_weights_from_disk", files)]


def _version_vllm(version: int) -> ServerCall:
    return ServerCall("/update_weight_version", {"new_version": str(version)})


SERVERS: Mapping[KnownServer, ServerRequests] = {
    "vllm": ServerRequests(
        sampling=_UNALTERED
        | {"return_token_ids": True, "return_tokens_as_token_ids": True, "include_stop_str_in_output": True},
        raw_logprobs_include=frozenset(),
        update=_update_vllm,
        pause=ServerCall("/pause?mode=wait"),
        resume=ServerCall("/resume"),
        sleep=ServerCall("/sleep?level=1", confirmed_by=("/is_sleeping", "is_sleeping")),
        settings="/server_info?config_format=json",
        wake_up=ServerCall("/wake_up"),
        version="/weight_info",
        set_version=_version_vllm,
        routing={},
        supports=True,
        needs="VLLM_SERVER_DEV_MODE=1, and --enable-sleep-mode for sleep",
    ),
    "sglang": ServerRequests(
        sampling=_UNALTERED | {"return_token_ids": True, "no_stop_trim": True},
        tempered_logprobs=True,
        raw_logprobs_include=frozenset({"repetition_penalty"}),
        tempered_logprobs_include=frozenset({"repetition_penalty"}),
        update=_update_sglang,
        untouched=frozenset({401, 403, 404, 405, 422}),  # 400 also follows a partial load of weights
        pause=ServerCall("/pause_generation", {"mode": "retract"}),
        resume=ServerCall("/continue_generation"),
        sleep=ServerCall("/release_memory_occupation"),
        wake_up=ServerCall("/resume_memory_occupation"),
        keeps_weights_asleep=False,
        version="/model_info",
        routing={"return_routed_experts": True},
        needs="--enable-memory-saver for sleep",
    ),
    "openai": ServerRequests(
        sampling={"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}, stops_at_ids=False
    ),
}
