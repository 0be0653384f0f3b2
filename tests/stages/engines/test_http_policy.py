"""The HTTP policy at a real server process, `tests/inference_server.py`, which is started once for each kind."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import aiohttp
import anyio
import msgspec
import numpy as np
import pytest
import structlog
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tests.failsafe import FAILSAFE_S
from tests.fake_policy import Letters
from tests.inference_server import EOS, TROUBLE, VOCABULARY, logprobs_of
from tests.loop_clock import LoopClock
from tests.stages.contracts.test_policies import assert_methods

from penstock import Context, SourceEnv, StopReason, Worker
from penstock.errors import (
    EngineFailed,
    EngineRefused,
    EngineTimedOut,
    InvalidConfig,
    NobodyListens,
    PenstockError,
    ProtocolMismatch,
)
from penstock.policies import Backoff, Completion, Engine, EnginePublisher, HttpPolicy, Policy, SamplingParams
from penstock.testing import drive_source, entered
from penstock.torch import WeightFolder

SERVER = Path(__file__).parents[2] / "inference_server.py"


def table(seed: int) -> NDArray[np.float32]:
    """Return logits of the next token after each token; the end token is not rare."""
    logits = np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
    logits[:, EOS] += 1
    return logits


def weights(folder: Path, seed: int) -> str:
    """Create a folder with the weights of `seed`, and return its URL."""
    folder.mkdir()
    save_file({"table": table(seed)}, folder / "model.safetensors")
    return f"file://{folder}"


Server = Literal["vllm", "sglang", "openai"]

Serve = Callable[[Server], str]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Yield a function for the URL of a server of a kind, which runs as long as this file's tests."""
    folder = tmp_path_factory.mktemp("weights")
    weights(folder / "0", 0)
    urls: dict[Server, str] = {}
    with ExitStack() as stack:

        def url(kind: Server) -> str:
            if kind not in urls:
                urls[kind] = stack.enter_context(process(kind, folder / "0"))
            return urls[kind]

        yield url


@contextmanager
def process(kind: str, folder: Path) -> Iterator[str]:
    with subprocess.Popen([sys.executable, SERVER, "0", kind, folder], stdout=subprocess.PIPE) as server:
        assert server.stdout
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def policy(url: str, server: Server = "vllm", **options: Any) -> HttpPolicy:
    chosen: dict[str, Any] = {"request_timeout_s": 30.0, "backoff": Backoff(attempts=3, first_s=0.001)} | options
    return HttpPolicy(url=url, model="bigram", server=server, **chosen)


@asynccontextmanager
async def engine(url: str, server: Server = "vllm", **options: Any) -> AsyncIterator[Engine]:
    async with policy(url, server, **options).open(Worker()) as opened:
        yield opened
        await opened.resume()


async def elapsed_s(call: Callable[[], Awaitable[object]]) -> float:
    """Return the seconds that `call` takes, while the clock of the event loop is set forward."""
    clock, loop, done = LoopClock(), asyncio.get_running_loop(), anyio.Event()

    async def run() -> None:
        await call()
        done.set()

    began = loop.time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await clock.set_forward_until(done.is_set, 0.5)
    return loop.time() - began


def prompt(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def trouble(name: str) -> NDArray[np.int32]:
    return prompt(TROUBLE[name], 3)


async def one(
    opened: Engine, given: NDArray[np.int32] | None = None, *, longest: int = 5, **options: Any
) -> Completion:
    sampling = SamplingParams(max_completion_tokens=longest, **options)
    (completion,) = await opened.generate([prompt(3) if given is None else given], sampling)
    return completion


def assert_logprobs(completion: Completion, first: int = 3, *, seed: int = 0, temperature: float = 1.0) -> None:
    """Assert the log-probabilities of a completion after token `first` against the model of `seed`."""
    pairs = pairwise([first, *completion.tokens.tolist()])
    expected = [logprobs_of(table(seed)[before], temperature)[token] for before, token in pairs]
    assert completion.logprobs is not None
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


async def requests_to(url: str) -> dict[str, Any]:
    """Return the requests to the server since the last call."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/tests") as response:
        answer: dict[str, Any] = await response.json(content_type=None)
        return answer


async def refuse(url: str, statuses: dict[str, int]) -> None:
    """Have the server answer requests for these paths alone with these statuses."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/tests/refused", json=statuses):
        pass


@asynccontextmanager
async def traits(url: str, **different: bool) -> AsyncIterator[None]:
    """Change the server within the body: it does not sleep, or keeps its memory."""
    async with aiohttp.ClientSession() as session:
        usual = {"may_sleep": True, "gives_memory_back": True}
        async with session.post(f"{url}/tests/traits", json=usual | different):
            pass
        try:
            yield
        finally:
            async with session.post(f"{url}/tests/traits", json=usual):
                pass


async def until(url: str, name: str, value: int) -> None:
    """Poll the server until it reports the value."""
    with anyio.fail_after(FAILSAFE_S):
        while (await requests_to(url))[name] != value:
            await checkpoint()


async def settle() -> None:
    for _ in range(50):
        await checkpoint()


# -- completions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_token_ids_go_in_and_token_ids_come_out_with_the_models_log_probabilities(
    serve: Serve, kind: Server
) -> None:
    prompts = [prompt(7, 2, 3), prompt(4)] * 10
    async with engine(serve(kind), kind) as opened:
        completions = await opened.generate(prompts, SamplingParams(max_completion_tokens=5))

    for given, completion in zip(prompts, completions, strict=True):
        assert_logprobs(completion, int(given[-1]))
        assert completion.policy_versions.tolist() == [0] * len(completion.tokens)
        ended = int(completion.tokens[-1]) == EOS
        assert EOS not in completion.tokens[:-1]
        assert completion.stop_reason == (StopReason.STOP if ended else StopReason.LENGTH)
        assert ended or len(completion.tokens) == 5
    assert len({tuple(completion.tokens) for completion in completions}) > 2


async def test_greedy_takes_the_most_probable_token(serve: Serve) -> None:
    async with engine(serve("vllm")) as opened:
        completion = await one(opened, greedy=True, temperature=0.3)

    before = [3, *completion.tokens.tolist()]
    assert completion.tokens.tolist() == [int(table(0)[token].argmax()) for token in before[:-1]]
    assert_logprobs(completion)


async def test_log_probabilities_of_another_distribution_than_the_sampled_one_are_left_out(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(serve("vllm")) as opened:
        raw = [await one(opened, temperature=0.5) for _ in range(2)]
    async with engine(serve("sglang"), "sglang") as opened:
        tempered = await one(opened, temperature=0.5)
    async with engine(serve("vllm"), tempered_logprobs=True) as opened:
        as_requested = await one(opened, temperature=0.5)

    assert [completion.logprobs for completion in raw] == [None, None]
    assert caplog.text.count("logprobs_omitted") == 1
    assert_logprobs(tempered, temperature=0.5)
    assert as_requested.logprobs is not None


async def test_nothing_stands_between_the_model_and_the_sample(serve: Serve) -> None:
    async with engine(serve("vllm")) as opened:
        await requests_to(serve("vllm"))
        await one(opened, temperature=0.7)
        (asked,) = (await requests_to(serve("vllm")))["asked"]

    assert asked["prompt"] == [3]
    assert asked.items() >= {"temperature": 0.7, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}.items()


PROCESSED = {"tempered_logprobs": True}

RESTRICTED = SamplingParams(max_completion_tokens=3, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.2, seed=3)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_restrictions_stop_strings_and_a_seed_a_prompt_reach_the_server(kind: Server, serve: Serve) -> None:
    async with engine(serve(kind), kind) as opened:
        await requests_to(serve(kind))
        sampling = msgspec.structs.replace(RESTRICTED, stop=("</a>",), stop_ids=(7, 9))
        await opened.generate([prompt(3), prompt(4)], sampling)
        asked = (await requests_to(serve(kind)))["asked"]

    for request in asked:
        assert request["max_tokens"] == 3
        assert request.items() >= {"top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2}.items()
        assert request["stop"] == ["</a>"]
        assert request["stop_token_ids"] == [7, 9]
        assert request.get("include_stop_str_in_output", request.get("no_stop_trim"))
    assert len({request["seed"] for request in asked}) == 2


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_a_server_that_goes_on_after_a_stop_token_is_hung_up_on(kind: Server, serve: Serve) -> None:
    stop_ids = tuple(range(1, 9))  # the server in the tests knows its own end token alone
    asks = prompt(3 if kind == "vllm" else TROUBLE["tokens as ids"])
    async with engine(serve(kind), kind) as opened:
        await requests_to(serve(kind))
        (completion,) = await opened.generate([asks], SamplingParams(max_completion_tokens=64, stop_ids=stop_ids))
        (asked,) = (await requests_to(serve(kind)))["asked"]

    assert completion.stop_reason == StopReason.STOP
    assert len(completion.tokens) < 64
    assert not set(stop_ids).intersection(completion.tokens[:-1].tolist())
    assert ("stop_token_ids" in asked) == (kind == "vllm")


async def test_greedy_sampling_is_not_truncated(serve: Serve) -> None:
    async with engine(serve("vllm")) as opened:
        await requests_to(serve("vllm"))
        await opened.generate([prompt(3)], msgspec.structs.replace(RESTRICTED, greedy=True))
        (asked,) = (await requests_to(serve("vllm")))["asked"]

    assert asked.items() >= {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.2}.items()


@pytest.mark.parametrize(
    ("kind", "options", "restriction", "reason"),
    [
        ("vllm", {}, {"top_k": 3}, None),
        ("vllm", {}, {"repetition_penalty": 1.2}, None),
        ("vllm", PROCESSED, {"top_p": 0.9}, "the server's are those after truncation"),
        ("vllm", PROCESSED, {"repetition_penalty": 1.2}, "the server's are those after the repetition penalty"),
        ("sglang", {}, {"min_p": 0.1, "temperature": 0.7}, None),
        ("sglang", {}, {"repetition_penalty": 1.2}, "the server's are those after the repetition penalty"),
        ("openai", {}, {"top_p": 0.9}, "the server's are those after truncation"),
    ],
)
async def test_log_probabilities_of_a_restricted_distribution_are_left_out(
    kind: Server, options: dict[str, Any], restriction: dict[str, Any], reason: str | None, serve: Serve
) -> None:
    given = trouble("tokens as ids") if kind == "openai" else None
    with structlog.testing.capture_logs() as logs:
        async with engine(serve(kind), kind, **options) as opened:
            completion = await one(opened, given, **restriction)

    assert (completion.logprobs is None) == (reason is not None)
    assert [event["reason"] for event in logs if event["event"] == "logprobs_omitted"] == [reason] * (
        reason is not None
    )


async def test_a_server_without_a_parameter_refuses_it(serve: Serve) -> None:
    async with engine(serve("openai"), "openai") as opened:
        with pytest.raises(InvalidConfig, match=r"SamplingParams.top_k: expected its default at a server of kind o"):
            await one(opened, top_k=4)


async def test_ids_that_are_written_as_tokens_will_do(serve: Serve) -> None:
    async with engine(serve("vllm")) as opened:
        completion = await one(opened, trouble("tokens as ids"))

    assert_logprobs(completion)


async def test_log_probabilities_that_a_server_does_not_give_are_not_made_up(serve: Serve) -> None:
    async with engine(serve("vllm")) as opened:
        completion = await one(opened, trouble("no logprobs"))

    assert completion.logprobs is None
    assert len(completion.tokens)


async def test_no_more_requests_than_the_limit_run_at_once(serve: Serve) -> None:
    async with engine(serve("vllm"), concurrency=3) as opened, anyio.create_task_group() as tasks:
        await requests_to(serve("vllm"))
        for _ in range(4):
            tasks.start_soon(
                partial(opened.generate, [trouble("never ends")] * 3, SamplingParams(max_completion_tokens=10**6))
            )
        await until(serve("vllm"), "running", 3)
        await settle()
        most = (await requests_to(serve("vllm")))["most_running"]
        tasks.cancel_scope.cancel()
        assert most == 3


async def test_a_source_samples_at_a_server(serve: Serve) -> None:
    class Yes:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, str]:
            return {"question": chr(1 + index % VOCABULARY)}

        def score_answer(self, answer: str, entry: Any) -> float:
            return float(len(answer)) if entry else 0.0

    context = Context()
    with entered(context):
        driven = await drive_source(
            SourceEnv(
                Yes,
                policy(serve("vllm")),
                Letters(),
                group_size=4,
                groups=4,
                sampling=SamplingParams(max_completion_tokens=6),
            )
        )

    assert sorted(group.instance_id for group in driven) == ["0", "1", "2", "3"]
    assert all(group.behavior_logprobs is not None and len(group) == 4 for group in driven)


# -- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("always broken", EngineFailed, "/v1/completions, attempt 3 of 3: 500: Internal Server Error"),
        ("too long", EngineRefused, "attempt 1 of 3: 400: maximum context length is 8"),
        ("nonsense", ProtocolMismatch, "expected a part of a completion as JSON, got b'{nonsense'"),
        ("cut off", EngineFailed, "attempt 3 of 3: ClientPayloadError"),
        ("error in the stream", EngineFailed, "attempt 3 of 3: 500: lost my mind"),
        ("refusal in the stream", EngineRefused, "attempt 1 of 3: 400: lost my mind"),
        ("text alone", ProtocolMismatch, "expected the ids of sampled tokens .* got text alone, '<.*>': use a server"),
        ("too few logprobs", ProtocolMismatch, "expected a log-probability for each of 1 tokens, got 0"),
        ("too much", ProtocolMismatch, "expected at most 5 tokens, got "),
        ("unknown reason", ProtocolMismatch, "expected a finish_reason among stop, .*, got 'boredom'"),
    ],
)
async def test_each_failure_raises_its_own_error(
    serve: Serve, what: str, error: type[PenstockError], message: str
) -> None:
    async with engine(serve("vllm")) as opened:
        with pytest.raises(error, match=message):
            await one(opened, trouble(what))


async def test_a_server_that_sends_nothing_is_waited_for_until_the_timeout(serve: Serve) -> None:
    async def ask(opened: Engine) -> None:
        with pytest.raises(EngineTimedOut, match=r"attempt 3 of 3: expected a response within 30 s"):
            await one(opened, trouble("silent"))

    async with engine(serve("vllm"), request_timeout_s=30.0) as opened:
        assert await elapsed_s(partial(ask, opened)) >= 90
        await until(serve("vllm"), "running", 0)


async def test_an_absent_server_is_an_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(NobodyListens, match=r"/v1/models, attempt 3 of 3: expected a server, got no connection"):
            async with engine(f"http://127.0.0.1:{unused.getsockname()[1]}"):
                pytest.fail("expected no server")


async def test_temporary_failures_are_retried_after_the_servers_retry_after(serve: Serve) -> None:
    async def busy(longest_s: float) -> float:
        backoff = Backoff(attempts=3, first_s=0.5, longest_s=longest_s)
        async with engine(serve("vllm"), backoff=backoff) as opened:
            return await elapsed_s(partial(one, opened, trouble("busy twice")))

    context = Context()
    with entered(context):
        as_requested_s = await busy(longest_s=30)
        limited_s = await busy(longest_s=0.8)

    assert 2 * 7 <= as_requested_s < 3 * 7
    assert 2 * 0.8 <= limited_s < 2 * 7
    assert context.metrics.emit(0)["rollout/retries"] == 4


async def test_a_cancelled_request_stops_the_server_sampling(serve: Serve) -> None:
    async with engine(serve("vllm")) as opened:
        await requests_to(serve("vllm"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(one, opened, trouble("never ends"), longest=10**6))
            await until(serve("vllm"), "running", 1)
            tasks.cancel_scope.cancel()
        await until(serve("vllm"), "given_up", 1)

        assert (await requests_to(serve("vllm")))["running"] == 0


async def test_where_one_prompt_is_refused_the_others_are_not_sampled_to_their_end(serve: Serve) -> None:
    async with engine(serve("vllm")) as opened:
        with pytest.raises(EngineRefused, match="maximum context length"):
            await opened.generate(
                [trouble("never ends"), trouble("too long")], SamplingParams(max_completion_tokens=10**6)
            )

        await until(serve("vllm"), "running", 0)


async def test_a_model_that_the_server_does_not_know_is_refused_when_the_policy_opens(serve: Serve) -> None:
    unknown = HttpPolicy(url=serve("vllm"), model="trigram", server="vllm")

    with pytest.raises(EngineRefused, match=r"expected 'trigram' at http://.*, got \['bigram'\]"):
        async with unknown.open(Worker()):
            pytest.fail("it has no such model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "url: expected http://host:port without a path, got '127.0.0.1:8000'"),
        ({"url": "http://host:8000/v1"}, "url: expected http://host:port without a path"),
        ({"server": "ollama"}, "server: expected one of auto, vllm, sglang, openai, got 'ollama'"),
        ({"concurrency": 0}, "concurrency: expected a whole number of at least 1, got 0"),
        ({"versions": "asked"}, "versions: expected one of engine, server, got 'asked'"),
        ({"versions": "server"}, 'versions: expected "engine", got "server": openai reports no versions'),
    ],
)
def test_a_recipe_that_can_never_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        policy(options.pop("url", "http://host"), options.pop("server", "openai"), **options)


def test_the_recipe_travels_to_workers_and_keeps_its_secret() -> None:
    recipe: Policy = HttpPolicy(url="http://host", model="bigram", api_key="sesame")

    assert pickle.loads(pickle.dumps(recipe)) == recipe  # noqa: S301 (our own bytes)
    assert "sesame" not in repr(recipe)


# -- weights and pauses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_new_weights_are_loaded_while_nothing_is_sampled(serve: Serve, kind: Server, tmp_path: Path) -> None:
    async with engine(serve(kind), kind) as opened:
        await requests_to(serve(kind))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(one, opened, longest=5))
            await opened.update_weights(weights(tmp_path / "1", 1), 17)
        completion = await one(opened, greedy=True)
        calls = [path for path, _ in (await requests_to(serve(kind)))["calls"]]
        await opened.update_weights(weights(tmp_path / "0", 0), 18)

    assert completion.tokens.tolist()[0] == int(table(1)[3].argmax())
    assert_logprobs(completion, seed=1)
    assert set(completion.policy_versions.tolist()) == {17}
    assert (
        calls
        == {
            "vllm": ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"],
            "sglang": ["/pause_generation", "/update_weights_from_disk", "/continue_generation"],
        }[kind]
    )


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_an_engine_that_asks_knows_of_weights_that_another_brought(
    serve: Serve, kind: Server, tmp_path: Path
) -> None:
    async with (
        engine(serve(kind), kind, versions="server") as trainer,
        engine(serve(kind), kind, versions="server") as worker,
    ):
        await trainer.update_weights(weights(tmp_path / "0", 0), 5)
        completion = await one(worker)

    assert set(completion.policy_versions.tolist()) == {5}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_nothing_is_sampled_with_weights_that_were_loaded_by_half(
    serve: Serve, kind: Server, tmp_path: Path
) -> None:
    async with engine(serve(kind), kind) as opened:
        with pytest.raises((EngineFailed, EngineRefused), match="No such file"):
            await opened.update_weights(f"file://{tmp_path}/nowhere", 1)
        assert "no_weights" in repr(opened)
        with pytest.raises(EngineRefused, match=r"an update failed: .*No such file.*call update_weights until"):
            await one(opened)
        await opened.update_weights(weights(tmp_path / "0", 0), 2)
        completion = await one(opened)

    assert set(completion.policy_versions.tolist()) == {2}


def torn(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def headless(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x08")


def nonsense(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")


def empty(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def incomplete(folder: Path) -> None:
    index = {"weight_map": {"table": "model.safetensors", "head": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def unreadable(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (torn, r"expected \d+ bytes in .*model.safetensors, according to its header, got \d+: write it again"),
        (headless, r"expected a whole safetensors file, got .* of 1 bytes"),
        (nonsense, "expected a safetensors file, got .*: JSON is malformed"),
        (empty, r"expected \*.safetensors in .*, got \[\]"),
        (incomplete, r"expected head in .*model-2.safetensors, according to model.safetensors.index.json, got none"),
        (unreadable, "expected an index of safetensors files, got .*index.json: Input data was truncated"),
    ],
)
async def test_a_torn_folder_is_refused_before_any_request(
    serve: Serve, tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    url = weights(tmp_path / "1", 1)
    harm(tmp_path / "1")

    async with engine(serve("vllm")) as opened:
        await requests_to(serve("vllm"))
        with pytest.raises(EngineRefused, match=message):
            await opened.update_weights(url, 1)
        assert (await requests_to(serve("vllm")))["calls"] == []
        completion = await one(opened)

    assert set(completion.policy_versions.tolist()) == {0}


async def test_weights_that_the_server_cannot_load_are_tried_once(serve: Serve, tmp_path: Path) -> None:
    async with engine(serve("vllm")) as opened:
        await requests_to(serve("vllm"))
        with pytest.raises(EngineRefused, match="/collective_rpc, attempt 1 of 3: 500: No such file"):
            await opened.update_weights(f"file://{tmp_path}/on-another-host", 1)
        calls = [path for path, _ in (await requests_to(serve("vllm")))["calls"]]
        await opened.update_weights(weights(tmp_path / "0", 0), 2)

    assert calls == ["/pause", "/collective_rpc", "/resume"]


async def test_an_update_that_is_refused_before_anything_is_loaded_leaves_the_weights(
    serve: Serve, tmp_path: Path
) -> None:
    async with engine(serve("vllm")) as opened:
        await refuse(serve("vllm"), {"/collective_rpc": 404})
        with pytest.raises(EngineRefused, match="404"):
            await opened.update_weights(weights(tmp_path / "0", 0), 9)
        await refuse(serve("vllm"), {})
        completion = await one(opened)

    assert set(completion.policy_versions.tolist()) == {0}


async def test_an_update_after_which_the_server_does_not_sample_again_has_failed(serve: Serve, tmp_path: Path) -> None:
    async with engine(serve("vllm")) as opened:
        await refuse(serve("vllm"), {"/resume": 400})
        with pytest.raises(EngineRefused, match="/resume, attempt 1 of 3: 400"):
            await opened.update_weights(weights(tmp_path / "0", 0), 9)
        await refuse(serve("vllm"), {})
        await opened.update_weights(weights(tmp_path / "again", 0), 10)
        completion = await one(opened)

    assert set(completion.policy_versions.tolist()) == {10}


async def test_one_engine_that_fails_keeps_no_other_from_going_on(serve: Serve, tmp_path: Path) -> None:
    async with engine(serve("vllm")) as dead, engine(serve("sglang"), "sglang") as alive:
        publisher = EnginePublisher(WeightFolder(tmp_path / "weights", {}), [dead, alive])
        await refuse(serve("vllm"), {"/resume": 400})
        with pytest.raises(EngineRefused, match="/resume, attempt 1 of 3: 400"):
            async with publisher.paused():
                assert "paused" in repr(alive)
        await refuse(serve("vllm"), {})

        assert "awake" in repr(alive)


async def test_a_pause_delays_requests_made_meanwhile(serve: Serve) -> None:
    completion: list[Completion] = []

    async def ask(opened: Engine) -> None:
        completion.append(await one(opened))

    async with engine(serve("vllm")) as opened, anyio.create_task_group() as tasks:
        await opened.pause()
        await opened.pause()
        await requests_to(serve("vllm"))
        tasks.start_soon(ask, opened)
        await settle()
        assert (await requests_to(serve("vllm")))["asked"] == []
        await opened.resume()

    assert len(completion) == 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_sleeps_and_wakes_and_has_its_weights_before_it_samples(
    serve: Serve, kind: Server, tmp_path: Path
) -> None:
    completion: list[Completion] = []

    async def ask(opened: Engine) -> None:
        completion.append(await one(opened, greedy=True))

    async with engine(serve(kind), kind) as opened, anyio.create_task_group() as tasks:
        await opened.sleep()
        tasks.start_soon(ask, opened)
        with pytest.raises(EngineRefused, match=r"asleep.*call wake_up first"):
            await opened.update_weights(f"file://{tmp_path}", 1)
        await opened.wake_up()
        await opened.update_weights(weights(tmp_path / "0", 0), 1)

    assert_logprobs(completion[0])


async def test_a_server_that_reports_itself_awake_after_sleep_counts_as_awake(serve: Serve) -> None:
    async with traits(serve("vllm"), may_sleep=False), engine(serve("vllm")) as opened:
        with pytest.raises(
            EngineRefused, match=r"expected is_sleeping from .*/is_sleeping after /sleep.*, got .*False"
        ):
            await opened.sleep()

        assert "awake" in repr(opened)
        assert len((await one(opened)).tokens)


async def test_a_server_that_sleeps_and_keeps_its_memory_is_logged_once(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with traits(serve("vllm"), gives_memory_back=False), engine(serve("vllm")) as opened:
        for _ in range(2):
            await opened.sleep()
            assert "asleep" in repr(opened)
            await opened.wake_up()

    assert caplog.text.count("sleep_keeps_memory") == 1


async def test_its_engine_has_the_methods_of_the_protocol(serve: Serve) -> None:
    async with engine(serve("vllm")) as opened:
        assert_methods(opened)


@pytest.mark.parametrize(("kind", "named"), [("vllm", "vllm"), ("sglang", "sglang"), ("openai", "openai")])
async def test_a_server_is_asked_which_one_it_is(serve: Serve, kind: Server, named: str) -> None:
    async with HttpPolicy(url=serve(kind), model="bigram").open(Worker()) as opened:
        assert repr(opened).startswith(f"<HttpEngine {named} at ")


async def test_a_server_that_fails_at_paths_that_it_does_not_know_is_of_no_known_kind(serve: Serve) -> None:
    await refuse(serve("openai"), dict.fromkeys(["/model_info", "/get_model_info", "/version"], 500))
    async with HttpPolicy(url=serve("openai"), model="bigram").open(Worker()) as opened:
        await refuse(serve("openai"), {})

        assert "openai" in repr(opened)


async def test_an_older_sglang_is_known_by_its_older_path(serve: Serve) -> None:
    await refuse(serve("sglang"), {"/model_info": 404})
    async with HttpPolicy(url=serve("sglang"), model="bigram").open(Worker()) as opened:
        await refuse(serve("sglang"), {})

        assert "sglang" in repr(opened)


async def test_a_server_that_is_found_to_be_of_no_known_kind_cannot_be_asked_for_its_version(serve: Serve) -> None:
    with pytest.raises(InvalidConfig, match='expected "engine", got "server": openai reports no versions'):
        async with HttpPolicy(url=serve("openai"), model="bigram", versions="server").open(Worker()):
            pytest.fail("it cannot say")


async def test_a_pause_that_the_server_does_not_understand_is_no_pause(serve: Serve) -> None:
    async with policy(serve("vllm"), "sglang").open(Worker()) as opened:
        with pytest.raises(EngineRefused, match="/pause_generation, attempt 1 of 3: 404: Not Found"):
            await opened.pause()

        assert len((await one(opened)).tokens)


async def test_a_server_of_no_known_kind_samples_and_is_asked_for_nothing_else(serve: Serve) -> None:
    async with policy(serve("openai"), "openai").open(Worker()) as opened:
        for method in (opened.pause, opened.sleep, partial(opened.update_weights, "file:///weights", 1)):
            with pytest.raises(EngineRefused, match=r"expected a server that can .*: set `server` to its kind"):
                await method()
        await opened.resume()
        await opened.wake_up()
        with pytest.raises(ProtocolMismatch, match="got text alone"):
            await one(opened)


async def test_weights_that_are_not_in_files_are_refused(serve: Serve) -> None:
    async with engine(serve("vllm")) as opened:
        with pytest.raises(EngineRefused, match="expected weights in a folder that the server can read, file:///…"):
            await opened.update_weights("shm:///tmp/control", 1)


async def test_of_a_folder_of_versions_the_newest_is_loaded(serve: Serve, tmp_path: Path) -> None:
    for version, seed in ((3, 1), (4, 2)):
        weights(tmp_path / f"step-{version:08d}", seed)

    async with engine(serve("vllm")) as opened:
        await opened.update_weights(f"file://{tmp_path}", 3)
        completion = await one(opened)
        with pytest.raises(EngineRefused, match=r"expected version 5 or newer in .*, got version 4"):
            await opened.update_weights(f"file://{tmp_path}", 5)
        await opened.update_weights(weights(tmp_path / "0", 0), 6)

    assert_logprobs(completion, seed=2)
    assert set(completion.policy_versions.tolist()) == {4}
