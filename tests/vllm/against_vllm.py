"""`HttpPolicy` and `OutsideServer` with vLLM itself, on a CPU: `make test-vllm`. The suite does not collect this file.

The model is a Qwen2 of two small layers with random weights, and the tokenizer knows 64 words. A server takes a minute
or two until it is ready, so that one serves all tests but the first.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from anyio.from_thread import start_blocking_portal
from numpy.typing import NDArray
from tests.failsafe import FAILSAFE_S
from tests.ports import free_port
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from penstock import StopReason, Worker
from penstock._stages.engines import http_engine
from penstock.errors import EngineRefused, ServerFailed
from penstock.policies import Completion, Engine, HttpPolicy, SamplingParams
from penstock.runs import load_run_config, train
from penstock.servers import OutsideServer, http_ready
from penstock.torch import WeightFolder

pytestmark = pytest.mark.timeout(600)

VOCABULARY = 64
SPECIAL = ("<pad>", "<eos>", "<unk>")
PAD, EOS = 0, 1
NOISE = 1e-4
"""Nats between two implementations, and of the rounding in a mean."""
PROMPT = np.array([5, 9, 2], np.int32)
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": "",
}


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    made: torch.nn.Module = Qwen2ForCausalLM(config)
    return made.train(mode=False)


def save(folder: Path, seed: int) -> Path:
    words = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), VOCABULARY))]
    pad, eos, unknown = SPECIAL
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast: Any = PreTrainedTokenizerFast
    saved = fast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, unk_token=unknown)
    saved.save_pretrained(folder)
    made: Any = model(seed)
    made.save_pretrained(folder)
    return folder


def tear(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def recipe(weights: Path, port: int, logs: Path, *more: str, longest: int = VOCABULARY) -> OutsideServer:
    arguments = {"model": weights, "served-model-name": "tiny", "host": "127.0.0.1", "port": port, "dtype": "float32"}
    limits = {"max-model-len": longest, "max-num-seqs": 4}
    options = [*(f"--{name}={value}" for name, value in (arguments | limits).items()), *more]
    return OutsideServer(
        command=[os.environ["VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *options],
        ready=http_ready(f"http://127.0.0.1:{port}/health"),
        name="vllm",
        logs=logs,
        environment=SETTINGS | {"VLLM_CACHE_ROOT": str(logs / "cache")},
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start vLLM with the weights of seed 0, and yield its URL."""
    folder, port = tmp_path_factory.mktemp("vllm"), free_port()
    server = recipe(save(folder / "weights", 0), port, folder)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(server.open()):
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Engine]:
    """Open an engine with the URL of its server as its only argument."""
    async with HttpPolicy(url=url, model="tiny", versions="server").open(Worker()) as engine:
        yield engine


async def greedy(engine: Engine) -> Completion:
    (completion,) = await engine.generate([PROMPT], SamplingParams(max_completion_tokens=8, greedy=True))
    return completion


def assert_sampled_by(seed: int, completion: Completion) -> None:
    """Assert that the model of `seed` samples this completion, with these log-probabilities."""
    tokens: NDArray[np.int32] = np.concatenate([PROMPT, completion.tokens])
    with torch.no_grad():
        logits = model(seed)(torch.from_numpy(tokens).long()[None]).logits[0]
    logprobs = torch.log_softmax(logits, dim=-1)[len(PROMPT) - 1 : -1]
    assert completion.tokens.tolist() == logprobs.argmax(dim=-1).tolist()
    assert completion.logprobs is not None
    np.testing.assert_allclose(completion.logprobs, logprobs.max(dim=-1).values.numpy(), atol=1e-4)


async def test_a_start_that_fails_ends_with_the_cause(tmp_path: Path) -> None:
    tear(save(tmp_path / "weights", 0))
    server = recipe(tmp_path / "weights", free_port(), tmp_path)

    with pytest.raises(ServerFailed, match=r"exited with status 1\n") as failed:
        async with server.open():
            pytest.fail("it has no weights")

    _, _, cause = str(failed.value).partition("The first error in it:\n\n")
    assert "SafetensorError: Error while deserializing header" in cause.splitlines()[0]


async def test_the_server_is_detected_as_vllm_and_samples_its_model(url: str) -> None:
    async with opened(url) as engine:
        assert repr(engine).startswith("<HttpEngine vllm at ")
        assert_sampled_by(0, await greedy(engine))


async def test_a_stop_string_ends_a_completion_after_the_token_that_completes_it(url: str) -> None:
    async with opened(url) as engine:
        whole = await greedy(engine)
        words = [f"w{token}" for token in whole.tokens]
        last = next(place for place in range(1, 8) if words[place] not in "".join(words[:place]))
        stop = (words[last - 1] + words[last],)  # vLLM writes no spaces between the words of this tokenizer
        (cut,) = await engine.generate([PROMPT], SamplingParams(max_completion_tokens=8, greedy=True, stop=stop))

    assert cut.tokens.tolist() == whole.tokens[: last + 1].tolist()
    assert cut.stop_reason == StopReason.STOP
    assert whole.logprobs is not None
    assert cut.logprobs is not None
    np.testing.assert_allclose(cut.logprobs, whole.logprobs[: last + 1], atol=1e-5)


async def test_truncated_and_penalised_samples_have_the_log_probabilities_of_the_whole_distribution(url: str) -> None:
    sampling = SamplingParams(max_completion_tokens=4, top_k=3, repetition_penalty=1.3, seed=5)

    async with opened(url) as engine:
        first, again = [await engine.generate([PROMPT] * 4, sampling) for _ in range(2)]

    for completion in first:
        tokens: NDArray[np.int32] = np.concatenate([PROMPT, completion.tokens])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(0)(torch.from_numpy(tokens).long()[None]).logits[0], dim=-1)
        sampled = logprobs[len(PROMPT) - 1 : -1].gather(1, torch.from_numpy(completion.tokens).long()[:, None])
        assert completion.logprobs is not None
        np.testing.assert_allclose(completion.logprobs, sampled[:, 0].numpy(), atol=1e-4)
    assert [completion.tokens.tolist() for completion in first] == [completion.tokens.tolist() for completion in again]
    assert len({tuple(completion.tokens) for completion in first}) > 1


async def test_it_samples_with_updated_weights_and_reports_their_version(url: str, tmp_path: Path) -> None:
    async with WeightFolder(tmp_path, model(1)) as folder, opened(url) as engine:
        await folder.publish(model(1).state_dict(), 7)
        await folder.written()
        await engine.update_weights(folder.url, folder.version)
        completion = await greedy(engine)
        await engine.update_weights(save(tmp_path.with_name("before"), 0).as_uri(), 8)

    assert_sampled_by(1, completion)
    assert set(completion.policy_versions.tolist()) == {7}


async def test_while_it_sleeps_nothing_is_sampled_and_kept_memory_is_logged(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_engine, "SETTINGS_TIMEOUT_S", FAILSAFE_S)  # vLLM starts programs to answer
    sampled: list[Completion] = []

    async def ask(engine: Engine) -> None:
        sampled.append(await greedy(engine))

    async with opened(url) as engine, anyio.create_task_group() as tasks:
        await engine.sleep()
        tasks.start_soon(ask, engine)
        await anyio.wait_all_tasks_blocked()
        assert not sampled
        await engine.wake_up()

    assert_sampled_by(0, sampled[0])
    assert "sleep_keeps_memory" in caplog.text


async def test_a_torn_folder_is_refused_and_the_weights_stay(url: str, tmp_path: Path) -> None:
    tear(save(tmp_path / "weights", 1))

    async with opened(url) as engine:
        with pytest.raises(EngineRefused, match="according to its header"):
            await engine.update_weights((tmp_path / "weights").as_uri(), 9)

        assert_sampled_by(0, await greedy(engine))


async def test_weights_that_it_cannot_load_are_tried_once_and_others_after_them_are_sampled_with(
    url: str, tmp_path: Path
) -> None:
    async with opened(url) as engine:
        with pytest.raises(EngineRefused, match="/collective_rpc, attempt 1 of 6: 500: "):
            await engine.update_weights((tmp_path / "on-another-host").as_uri(), 9)
        with pytest.raises(EngineRefused, match="an update failed"):
            await greedy(engine)
        await engine.update_weights(save(tmp_path / "weights", 0).as_uri(), 10)

        assert_sampled_by(0, await greedy(engine))


def test_a_configured_run_samples_at_the_server_and_updates_its_weights(url: str, tmp_path: Path) -> None:
    model, folder = save(tmp_path / "model", 0), tmp_path / "run"
    config = load_run_config(
        {
            "model": {"path": str(model)},
            "data": {"path": str(questions(tmp_path)), "chat": False, "evaluation": 2},
            "reward": {"functions": [{"function": "tests.vllm.rewards:words"}]},
            "algorithm": {"steps": 3, "prompts": 2, "group_size": 2, "max_lag": 0, "optimizer": {"lr": 1e-2}},
            "sampling": {"max_completion_tokens": 5},
            "engine": "vllm",
            "server": {"url": url, "model": "tiny"},
            "folder": str(folder),
        }
    )

    summary = anyio.run(train, config)

    assert summary.ledger["ended"]["trained"] == 3 * 2 * 2
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = [line for line in map(json.loads, lines) if "loss" in line]  # not the evaluation after the last step
    assert [step["staleness/max"] for step in metrics] == [
        0,
        0,
        0,
    ]  # each was sampled with the weights of the step before
    assert max(abs(step["kl"]) for step in metrics) < NOISE  # and vLLM computes what the trainer does


def questions(folder: Path) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{5 + number} w9"}) + "\n" for number in range(12)))
    return path
