"""`penstock doctor --endpoint`: twenty programs find each way in which an inference server is not token-exact."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cells import cells
from tests.commands.wrong_server import LISTED, TOLD, WrongServer, model_folder, served_format
from tests.tiny_model import TinyModel
from typer.testing import CliRunner

from penstock import SourceEnv
from penstock._cli.app import commands
from penstock._cli.endpoint_checks import examined, root_of
from penstock._cli.endpoint_programs import PROGRAMS, conclusion
from penstock._cli.findings import Finding
from penstock.agents import AgentClient
from penstock.chat import ChatFormat
from penstock.errors import EngineFailed, EngineRefused, InvalidConfig, NobodyListens, ProtocolMismatch
from penstock.policies import SamplingParams
from penstock.testing import drive_source
from penstock.torch import TorchPolicy

EXACT = "this server is token-exact: agents can train through it"
NO_IDS = "the answers have no token ids: text would be tokenized again, into other tokens than were sampled"
UNREADABLE = "no answer that can be read: "
ALL_MESSAGES = [*PROGRAMS][1:8]


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return served_format(model_folder(tmp_path))


async def findings_of(chat: ChatFormat, wrong: str = "") -> list[Finding]:
    async with WrongServer(chat, wrong).serving() as url:
        return await examined(url, chat)


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {each.name: each.verdict for each in findings}


async def test_a_server_that_keeps_tokens_is_exact_in_all_twenty_programs(chat: ChatFormat) -> None:
    findings = await findings_of(chat)

    assert verdicts(findings) == dict.fromkeys(PROGRAMS, "exact")
    assert len(findings) == 20
    assert conclusion(findings) == EXACT


async def test_the_endpoint_of_agents_over_the_torch_engine_is_exact(chat: ChatFormat) -> None:
    found: list[Finding] = []

    class Examines:
        async def drive(self, _: int, client: AgentClient) -> float:
            found.extend(await examined(client.base_url, chat))
            return 1.0

    policy = TorchPolicy(partial(TinyModel, vocabulary=300, context=1024), chat.tokenizer.eos_id)
    sampling = SamplingParams(max_completion_tokens=32)
    env = SourceEnv(Examines, policy, chat=chat, group_size=1, groups=1, max_length=1000, sampling=sampling)
    (group,) = await drive_source(env)

    assert [each for each in found if each.verdict == "differs"] == []
    assert len(found) == 20
    assert group.loss_mask.sum() > 100


WRONG: Mapping[str, tuple[list[str], str]] = {
    "another tokenizer": (["tokenizer"], "the text differs from its token "),
    "special tokens are text": (["special tokens in a text"], "expected '<|im_end|>"),
    "a system prompt of its own": (ALL_MESSAGES, "the prompt differs from its token "),
    "a start token twice": (ALL_MESSAGES, "a start token comes twice"),
    "keeps thoughts out of prompts": (["thinking in the history"], "the prompt differs from its token "),
    "writes no tools": (
        ALL_MESSAGES[4:],
        "arguments that are no JSON are replaced: the prompt differs from its token ",
    ),
    "reads one call of a turn": (["parallel tool calls"], "the prompt differs from its token "),
    "refuses tools": (ALL_MESSAGES[4:], "tools are refused (400: auto tool choice requires a parser)"),
    "fails at malformed calls": (["malformed tool call"], "the server fails (500: JSONDecodeError), so that an agent"),
    "no ids": ([*PROGRAMS][:-1], NO_IDS),
    "answers in another form": ([*PROGRAMS][:-1], UNREADABLE),
    "fewer log-probabilities than tokens": (
        ["ids of an answer", "log-probabilities"],
        "expected a log-probability for each token, got 7 for 8 tokens",
    ),
    "text of other tokens": (["ids of an answer"], "is not that of its tokens"),
    "changes prompts of ids": (
        ["tokens in and out", "temperature of a call", "log-probabilities"],
        "the prompt of ids differs from its token 0 on",
    ),
    "generates other tokens": (["tokens in and out"], "the answer of /inference/v1/generate differs"),
    "no /inference/v1/generate": ([], ""),
    "tokenizes turns again": (
        ["a continued turn"],
        "the turn is tokenized again: of its 8 ids, the next prompt has the ",
    ),
    "cut turns end by stop": (["end by length"], "expected 2 tokens that end by length, got 2 that end by 'stop'"),
    "ignores stop strings": (["stop string"], "does not end the turn"),
    "ids end before the stop string": (["stop string"], "the ids end before the stop string"),
    "ignores n": (["n = 3"], "expected 3 choices, got 1"),
    "one seed for all choices": (["n = 3"], "the 3 choices are one"),
    "streams without ids": (["stream"], "a stream has no token ids"),
    "streams lose a token": (["stream"], "the streamed turn differs from its token "),
    "ignores seeds": (["seed"], "two calls with one seed differ"),
    "ignores temperature": (["n = 3", "temperature of a call"], "temperature is ignored: turns at 2 are those at 0"),
    "log-probabilities of temperature 1": (
        ["temperature of a call"],
        "log-probabilities at another temperature are those at temperature 1",
    ),
    "log-probabilities of another temperature": (
        ["log-probabilities"],
        "nats from those of the same tokens in a prompt",
    ),
    "no log-probabilities of prompts": ([], ""),
    "ignores wrong values": (["refused parameters"], "temperature=-1 is accepted and ignored, or cut"),
    "ignores logit_bias": (["refused parameters"], "logit_bias is accepted and ignored"),
    "cuts long prompts": (["too long prompt"], "a prompt that is too long is accepted and ignored, or cut"),
    "fails at long prompts": (
        ["too long prompt"],
        "a prompt that is too long is answered by 500: the context is exceeded",
    ),
    "redirects malformed calls": (["malformed tool call"], "the server fails (307: expected an answer, got a redirect"),
    "wants a key for wrong values": (["refused parameters"], "temperature=-1 is answered by 401: temperature is"),
    "answers wrong values by a list": (["refused parameters"], UNREADABLE + "ValidationError: Expected `object`"),
    "answers nest": ([*PROGRAMS][:-1], UNREADABLE + "RecursionError"),
    "ids beyond any vocabulary": ([*PROGRAMS][:-1], UNREADABLE + "ValidationError: Expected `int` <= 2147483647"),
    "log-probabilities are a list": ([*PROGRAMS][:-1], UNREADABLE + "ValidationError: Expected `object"),
    "a message is text": ([*PROGRAMS][:-1], UNREADABLE + "ValidationError: Expected `object"),
    "a text is a number": ([*PROGRAMS][:-1], UNREADABLE + "ValidationError: Expected `str"),
    "streams what is no JSON": (["stream"], UNREADABLE + "DecodeError"),
    "streams lists": (["stream"], UNREADABLE + "ValidationError: Expected `object`"),
    "streams more than 4 MiB": (["stream"], "expected a response of at most 4,194,304 bytes, got more"),
    "generates more than 4 MiB": (["tokens in and out"], "expected a response of at most 4,194,304 bytes, got more"),
    "log-probabilities of a part of the prompt": (
        ["temperature of a call", "log-probabilities"],
        UNREADABLE + "ProtocolMismatch: expected log-probabilities of ",
    ),
}
"""The programs that differ for a server that is wrong in one way, and the cause that one of them tells."""


@pytest.mark.parametrize("wrong", cells(WRONG, run=list(WRONG)[::3]))
async def test_each_way_to_be_wrong_is_told_by_its_cause(wrong: str, chat: ChatFormat) -> None:
    programs, cause = WRONG[wrong]

    findings = await findings_of(chat, wrong)

    differing = [each for each in findings if each.verdict == "differs"]
    assert [each.name for each in differing] == programs
    assert any(cause in each.affects for each in differing) or not programs
    assert all(each.remedy for each in differing)
    assert (conclusion(findings) == EXACT) == (not differing)


async def test_a_server_whose_messages_alone_differ_is_usable_by_tokens(chat: ChatFormat) -> None:
    findings = await findings_of(chat, "tokenizes turns again")

    assert conclusion(findings) == (
        "by tokens it is exact: sample by HttpPolicy, with penstock's endpoint in front of agents; 1 of 20 differ"
    )


async def test_a_server_that_wants_a_key_is_given_it(chat: ChatFormat) -> None:
    async with WrongServer(chat, "needs a key").serving() as url:
        with pytest.raises(EngineRefused, match="401: expected a key"):
            await examined(url, chat)
        findings = await examined(url, chat, "secret")

    assert conclusion(findings) == EXACT


async def test_the_first_program_says_that_a_server_wants_a_key(chat: ChatFormat) -> None:
    with pytest.raises(EngineRefused, match="401: expected a key: set --key, or OPENAI_API_KEY, to a key"):
        await findings_of(chat, "wants a key for completions")


async def test_a_server_that_does_not_answer_in_time_is_asked_no_more(chat: ChatFormat) -> None:
    told: list[str] = []

    async with WrongServer(chat, "never answers").serving() as url:
        (finding,) = await examined(url, chat, tell=told.append, timeout_s=0.2)

    assert told == ["list of models", "tokenizer"]
    assert (finding.name, finding.verdict, finding.found) == ("tokenizer", "differs", "no answer within 0.2 s")
    assert conclusion([finding]) == "the server stopped answering: 19 of 20 programs were not asked"


@pytest.mark.parametrize("wrong", cells(LISTED, run=["lists a text", "lists without end"]))
async def test_a_list_of_models_that_cannot_be_read_is_told_in_one_line(wrong: str, chat: ChatFormat) -> None:
    with pytest.raises(
        ProtocolMismatch, match=r"expected a list of models from http://.*/v1/models, got .*: ."
    ) as told:
        await findings_of(chat, wrong)

    assert "\n" not in str(told.value)


async def test_an_error_that_nests_is_repeated_as_its_text(chat: ChatFormat) -> None:
    with pytest.raises(EngineFailed, match=r"500: \[\[\["):
        await findings_of(chat, "fails by an error that nests")


@pytest.mark.parametrize("wrong", cells(TOLD, run=["tells the bound of transformers"]))
async def test_a_bound_that_no_prompt_exceeds_is_left_untried(wrong: str, chat: ChatFormat) -> None:
    findings = await findings_of(chat, wrong)

    assert verdicts(findings)["too long prompt"] == "unknown"
    assert findings[-1].found == f"the server tells a bound of {TOLD[wrong]:g} tokens, more than are sent here"


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/models", "/v1/completions", "/v1/chat/completions"])
def test_a_url_may_have_the_paths_that_clients_append(path: str) -> None:
    assert root_of(f"http://127.0.0.1:8000/r/run{path}") == "http://127.0.0.1:8000/r/run"


@pytest.mark.parametrize("url", ["foo", "host:8000", "http://", "http://host:99999", "http://host/v1?x=1", "http://["])
def test_what_is_no_url_of_a_server_is_told(url: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(f"--endpoint: expected http://host:port, got {url}")):
        root_of(url)


async def test_an_address_without_a_server_is_told(chat: ChatFormat) -> None:
    with pytest.raises(NobodyListens, match="expected a server, got no connection"):
        await examined("http://127.0.0.1:9/v1", chat)


@pytest.mark.parametrize(("verdict", "status"), [("exact", 0), ("unknown", 0), ("differs", 1)])
def test_the_command_prints_each_finding_and_exits_with_1_if_one_differs(
    verdict: Any, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Finding("seed", "two calls differ", verdict, *(("a seed is ignored", "leave it out") if status else ()))
    monkeypatch.setattr("penstock._cli.endpoint_checks.endpoint_checks", lambda *_: [found])

    ran = CliRunner().invoke(commands, ["doctor", "--endpoint", "http://127.0.0.1:8000/v1", "--model", "folder"])

    assert ran.exit_code == status
    assert f"seed   {verdict}" in ran.stdout
    assert ("seed: a seed is ignored\n  to do: leave it out" in ran.stdout) == bool(status)


def test_an_endpoint_needs_the_model_that_it_serves() -> None:
    ran = CliRunner().invoke(commands, ["doctor", "--endpoint", "http://127.0.0.1:8000/v1"])

    assert ran.exit_code == 2
    assert "expected --endpoint and --model, or neither" in ran.output
