"""/v1/completions, /v1/models, /tokenize and /inference/v1/generate over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.stages.agents.served import Client, chat_format, engine_of, of_engine, of_script, serving

from penstock.chat import ChatFormat

ASK: list[dict[str, Any]] = [{"role": "user", "content": "one?"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return chat_format(tmp_path)


def root(client: Client) -> str:
    return client.served.base_url.removesuffix("/v1")


# -- /v1/completions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "texts", "tokens", "lists of tokens"])
async def test_a_prompt_is_a_text_or_tokens(chat: ChatFormat, form: str) -> None:
    ids = list(chat.tokenizer.encode("once"))
    prompt: Any = {"text": "once", "texts": ["once"], "tokens": ids, "lists of tokens": [ids]}[form]
    rollout = of_script(chat, " upon a time")
    async with serving(chat, rollout) as client:
        _, answer = await client.post("/completions", {"prompt": prompt, "max_tokens": 4, "stop": " a"})

    ((asked, sampling),) = rollout.asked
    assert asked.tolist() == ids
    assert sampling.max_completion_tokens == 4
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], answer["object"]) == (" upon", "stop", "text_completion")


async def test_tokens_that_continue_a_completion_are_the_prompt_of_the_next(chat: ChatFormat) -> None:
    async with engine_of(chat) as engine:
        rollout = of_engine(engine)
        async with serving(chat, rollout) as client:
            body = {"prompt": [5, 6, 7], "return_token_ids": True, "logprobs": 0, "n": 2, "seed": 1}
            _, first = await client.post("/completions", body)
            kept = [*first["prompt_token_ids"], *first["choices"][1]["token_ids"]]
            await client.post("/completions", {"prompt": [*kept, 9]})

    sampled = [call for _, call in rollout.calls[:2]]
    assert first["choices"][1]["token_ids"] in [call.tokens.tolist() for call in sampled]
    assert rollout.asked[2][0].tolist() == [*kept, 9]
    logprobs = first["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(first["choices"][0]["token_ids"])


async def test_a_completion_is_streamed(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat, "yes")) as client:
        body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
        _, events = await client.post("/completions", body)

    assert [event["choices"][0]["text"] for event in events[:-2]] == ["yes"]
    assert (events[-2]["usage"]["completion_tokens"], events[-1]) == (4, "[DONE]")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ["a", "b"]),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [1, "a"]),
        ("prompt", [1, [2]]),
        ("prompt", [[]]),
        ("prompt", [-1]),
        ("prompt", [2**31]),
        ("prompt", None),
        ("logprobs", 2),
        ("echo", True),
        ("suffix", "end"),
        ("best_of", 3),
        ("messages", []),
    ],
)
async def test_what_completions_cannot_do_is_400_with_the_name_of_the_field(
    chat: ChatFormat, field: str, value: Any
) -> None:
    rollout = of_script(chat)
    async with serving(chat, rollout) as client:
        status, error = await client.refused("/completions", {"prompt": "x", field: value})

    assert (status, len(rollout.asked)) == (400, 0)
    assert field in f"{error['param']} {error['message']}"


# -- models and tokens -------------------------------------------------------------------------------------------------


async def test_there_is_one_model(chat: ChatFormat) -> None:
    async with (
        serving(chat, of_script(chat)) as client,
        client.session.get(f"{client.served.base_url}/models") as came,
    ):
        assert [model["id"] for model in (await came.json())["data"]] == ["policy"]


async def test_the_tokens_of_a_conversation_are_those_of_its_call(chat: ChatFormat) -> None:
    rollout = of_script(chat, "y es", "done")
    async with serving(chat, rollout) as client:
        answer = await client.chat(ASK, tools=[TOOL])
        messages = [*ASK, answer["choices"][0]["message"], *ASK]
        _, counted = await client.post("/tokenize", {"messages": messages, "tools": [TOOL]}, url=root(client))
        await client.chat(messages, tools=[TOOL])

    assert counted["tokens"] == rollout.asked[1][0].tolist()
    assert counted["count"] == len(counted["tokens"])


async def test_a_text_is_tokenized_as_a_prompt(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat)) as client:
        body = {"prompt": "once", "return_token_strs": True}
        _, counted = await client.post("/tokenize", body, url=root(client))
        status, error = await client.refused("/tokenize", {}, url=root(client))

    assert counted["tokens"] == list(chat.tokenizer.encode("once"))
    assert "".join(counted["token_strs"]) == "once"
    assert (status, error["param"]) == (400, "prompt")


# -- /inference/v1/generate --------------------------------------------------------------------------------------------


async def test_tokens_in_are_the_prompt_and_tokens_out_what_was_sampled(chat: ChatFormat) -> None:
    async with engine_of(chat) as engine:
        rollout = of_engine(engine)
        async with serving(chat, rollout) as client:
            sampling = {"n": 2, "max_tokens": 5, "temperature": 0.5, "logprobs": 1, "seed": 3}
            of_verifiers = {"skip_special_tokens": False, "routed_experts_prompt_start": 2}
            body = {"token_ids": [9, 8, 7], "sampling_params": sampling | of_verifiers, "request_id": "mine"}
            _, answer = await client.post("/inference/v1/generate", body, url=root(client))

    assert answer["request_id"] == "mine"
    by_tokens = {str(call.tokens.tolist()): call for _, call in rollout.calls}
    for choice in answer["choices"]:
        call = by_tokens[str(choice["token_ids"])]
        assert call.temperature == 0.5
        assert call.logprobs is not None
        content = choice["logprobs"]["content"]
        assert [each["token"] for each in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert [each["logprob"] for each in content] == pytest.approx(call.logprobs.tolist(), abs=1e-6)
    assert [asked.tolist() for asked, _ in rollout.asked] == [[9, 8, 7]] * 2


async def test_a_managed_server_of_atropos_has_the_tokens_with_their_log_probabilities(chat: ChatFormat) -> None:
    rollout = of_script(chat, "yes")
    async with serving(chat, rollout) as client:
        body = {"prompt": {"prompt_token_ids": [9, 8, 7]}, "logprobs": 0, "max_tokens": 5, "temperature": 0.5, "n": 1}
        _, answer = await client.post("/generate", body, url=root(client))
        status, _ = await client.refused("/generate", {"prompt": "text"}, url=root(client))
        async with client.session.get(f"{root(client)}/health") as healthy:
            assert (healthy.status, status) == (200, 400)

    ((prompt, call),) = rollout.calls
    assert (prompt.tolist(), rollout.asked[0][1].max_completion_tokens) == ([9, 8, 7], 5)
    assert call.logprobs is not None
    assert (answer["text"], answer["finish_reasons"]) == (["yes"], ["stop"])
    (found,) = answer["logprobs"]
    assert [list(each) for (each,) in found] == [[str(token)] for token in call.tokens.tolist()]
    assert [next(iter(each.values())) for (each,) in found] == pytest.approx(call.logprobs.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("token_ids", {"token_ids": []}),
        ("token_ids", {"token_ids": [-1]}),
        ("token_ids", {}),
        ("stream", {"token_ids": [1], "stream": True}),
        ("features", {"token_ids": [1], "features": {}}),
        ("logprobs", {"token_ids": [1], "sampling_params": {"logprobs": 5}}),
        ("presence_penalty", {"token_ids": [1], "sampling_params": {"presence_penalty": 1}}),
        ("prompt_logprobs", {"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}}),
    ],
)
async def test_what_generate_cannot_do_is_400_with_the_name_of_the_field(
    chat: ChatFormat, field: str, body: dict[str, Any]
) -> None:
    async with serving(chat, of_script(chat)) as client:
        status, error = await client.refused("/inference/v1/generate", body, url=root(client))

    assert status == 400
    assert field in f"{error['param']} {error['message']}"
