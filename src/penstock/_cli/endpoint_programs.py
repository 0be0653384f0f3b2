"""Twenty programs for `penstock doctor --endpoint`: is a server token-exact, so that agents can train through it?

Each asks the server, and compares its token ids with those of the model's folder, or with those of another answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeAlias

from .._pipeline.errors import EngineRefused, InvalidConfig, InvalidData
from .._stages.http.bounded_response import RequestFailed
from .._stages.tokenizers.chat_format import ChatFormat
from .._stages.tokenizers.start_tokens import prompt_ids
from .asked_server import CHAT, TEXT, AnswerInIds, AskedServer, Differs, NotAsked
from .findings import Finding

TEXTS = (
    "Hello, world! It's 3.14159 % of 1,000,000;\n\tx = [i**2 for i in range(10)]  # done\r\n\n   end ",
    "naïve café, e\u0301\u00e9, Ångström, Привет, 你好，世界, こんにちは, שלום, नमस्ते",
    "👩‍👩‍👧‍👦 🇪🇺 \u200b\u00a0\ufeff\u202e ﬁ ½ ℌ 𝔘 \x07",
)

ASKED = [{"role": "user", "content": "Name a colour."}]

AGAIN = {"role": "user", "content": "Another one?"}

LONG, LONGEST = 2**17, 2**20
"""Tokens of a prompt that is too long, if the server does not tell its bound; the largest bound that is tried."""

REFUSALS = {HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY}
"""Statuses that say that a value of the request cannot be served."""

LOCKED = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}

NOISE = 0.05
"""Nats between two computations of a log-probability in bfloat16; a wrong temperature or token moves it further."""

HOT, TOKENS = 2.0, 8

SERVE_TEMPLATE = (
    "serve the folder's own files: vLLM takes --tokenizer FOLDER and --chat-template FOLDER/chat_template.jinja"
)

SEND_TOKENS = "put penstock's endpoint in front (docs/agents.md): it samples here by tokens, and keeps those of turns"

UNREADABLE = "\ufffd"
"""Text of bytes that are no character."""

LONGEST_CAUSE = 400
"""Characters of a cause that repeats what the server sent."""

SHOWN = 24
"""Characters of a text around the first difference."""


@dataclass(frozen=True)
class Examined:
    """A server, and the folder that it should serve."""

    server: AskedServer
    chat: ChatFormat
    timeout_s: float
    """Bound on each answer."""

    async def same_prompt(self, messages: Sequence[Any], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Compare the prompt that the server makes of messages with that of the folder."""
        own: list[int] | None
        try:
            own = self.chat.prompt(messages, tools=tools)
        except (InvalidData, InvalidConfig):
            own = None
        try:
            answer = await self.server.chat(messages, max_tokens=1, **({"tools": tools} if tools else {}))
        except RequestFailed as error:
            if own is None and error.status in REFUSALS:
                return "the template refuses it, here and there"
            if tools and "tool" in str(error):
                raise Differs(
                    f"tools are refused ({error})", "start vLLM with --enable-auto-tool-choice --tool-call-parser NAME"
                ) from None
            raise
        if own is None:
            raise Differs("the folder's template refuses these messages, the server's does not", SERVE_TEMPLATE)
        self.check_same(own, answer.prompt, "prompt")
        return f"{len(own)} tokens"

    def check_same(self, own: Sequence[int], got: Sequence[int], what: str, remedy: str = SERVE_TEMPLATE) -> None:
        """Check that the server's tokens are those of the folder.

        Raises:
            Differs: they are not; the cause names the place.
        """
        if list(own) == list(got):
            return
        if list(got[1:]) == list(own) and got[0] == own[0]:
            cause = "a start token comes twice: the template writes one, and the server's tokenizer adds another"
            raise Differs(cause, "remove one: from the template, or add_bos_token from tokenizer_config.json")
        place = next((i for i, pair in enumerate(zip(own, got, strict=False)) if pair[0] != pair[1]), None)
        place = min(len(own), len(got)) if place is None else place
        expected, found = (self.chat.tokenizer.decode(list(each[place : place + SHOWN]))[:SHOWN] for each in (own, got))
        raise Differs(
            f"the {what} differs from its token {place} on: expected {expected!r}, as of the folder, got {found!r}",
            remedy,
        )

    async def greedy(self, tokens: int = TOKENS, **fields: Any) -> AnswerInIds:
        """Return the most likely turn."""
        return await self.server.chat(ASKED, temperature=0, max_tokens=tokens, **fields)

    @property
    def prompt(self) -> list[int]:
        """Return the folder's prompt of a question."""
        return self.chat.prompt(ASKED)


Program: TypeAlias = Callable[[Examined], Awaitable[str]]


# -- tokens of texts and messages --------------------------------------------------------------------------------------


async def _tokenizer(of: Examined) -> str:
    for text in TEXTS:
        answer = await of.server.complete(text, max_tokens=1)
        own = prompt_ids(of.chat.tokenizer, text)
        of.check_same(own, answer.prompt, "text", "serve the tokenizer of the folder: vLLM takes --tokenizer FOLDER")
    return f"{len(TEXTS)} texts of several scripts"


async def _special_tokens(of: Examined) -> str:
    end = of.chat.tokenizer.decode([of.chat.tokenizer.eos_id])
    return await of.same_prompt([{"role": "user", "content": f"What does {end} mean?"}])


async def _one_turn(of: Examined) -> str:
    return await of.same_prompt(ASKED)


async def _system(of: Examined) -> str:
    said = [*ASKED, {"role": "assistant", "content": "Blue."}, AGAIN]
    return await of.same_prompt([{"role": "system", "content": "Answer in one word."}, *said])


async def _thinking(of: Examined) -> str:
    thought = {"role": "assistant", "content": "<think>\nThe sky.\n</think>\n\nBlue."}
    return await of.same_prompt([*ASKED, thought, AGAIN])


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def _with_calls(*arguments: str) -> list[dict[str, Any]]:
    """Return a conversation in which a tool was called with these arguments, JSON or not."""
    ids = [f"call{number:05d}" for number in range(len(arguments))]
    calls = [
        {"id": name, "type": "function", "function": {"name": "add", "arguments": given}}
        for name, given in zip(ids, arguments, strict=True)
    ]
    results = [{"role": "tool", "tool_call_id": name, "content": "5"} for name in ids]
    question = {"role": "user", "content": "2+3?"}
    return [question, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


async def _tool_call(of: Examined) -> str:
    return await of.same_prompt(_with_calls('{"a": 2, "b": 3}'), [ADD])


async def _parallel_calls(of: Examined) -> str:
    return await of.same_prompt(_with_calls('{"a": 2, "b": 3}', '{"b":3,"a":2}'), [ADD])


SEND_AS_TEXT = "put penstock's endpoint in front, or have agents send malformed calls back as text"


async def _malformed_call(of: Examined) -> str:
    said = _with_calls('{"a": 2, "b"')
    try:
        return await of.same_prompt(said, [ADD])
    except RequestFailed as error:
        if error.status not in REFUSALS:
            raise Differs(
                f"the server fails ({error}), so that an agent cannot send back what the policy wrote",
                SEND_AS_TEXT,
            ) from None
        return f"refused with {error.status}"
    except Differs as error:
        raise Differs(f"arguments that are no JSON are replaced: {error}", SEND_AS_TEXT) from None


# -- what was sampled --------------------------------------------------------------------------------------------------


async def _ids_of_answers(of: Examined) -> str:
    said = (await of.greedy(logprobs=True)).first
    if said.logprobs is None or len(said.logprobs) != len(said.tokens):
        got = "none" if said.logprobs is None else f"{len(said.logprobs)} for {len(said.tokens)} tokens"
        raise Differs(f"expected a log-probability for each token, got {got}", "ask for them: vLLM has them by default")
    text = of.chat.tokenizer.decode([each for each in said.tokens if each != of.chat.tokenizer.eos_id])
    if said.text.strip() not in text:
        raise Differs(
            f"the text {said.text[:SHOWN]!r} is not that of its tokens, {text[:SHOWN]!r}",
            "serve the tokenizer of the folder: vLLM takes --tokenizer FOLDER",
        )
    return f"{len(said.tokens)} ids, each with a log-probability"


async def _tokens_in_and_out(of: Examined) -> str:
    sampled = await of.server.complete(of.prompt, temperature=0, max_tokens=TOKENS)
    of.check_same(
        of.prompt, sampled.prompt, "prompt of ids", "send another request: prompts of ids must stay as they are"
    )
    generated = await of.server.generate(of.prompt, temperature=0, max_tokens=TOKENS)
    if generated is None:
        return "by /v1/completions; no /inference/v1/generate"
    of.check_same(
        sampled.first.tokens, generated, "answer of /inference/v1/generate", "report it to the server's project"
    )
    return "by /v1/completions and /inference/v1/generate"


async def _continued_turn(of: Examined) -> str:
    first = await of.server.chat(ASKED, temperature=1, seed=3, max_tokens=TOKENS)
    message = {name: value for name, value in first.first.message.items() if value is not None}
    second = await of.server.chat([*ASKED, message, AGAIN], max_tokens=1)
    known = [*first.prompt, *first.first.tokens]
    if second.prompt[: len(known)] == known:
        return f"{len(first.first.tokens)} sampled ids are in the next prompt"
    if second.prompt[: len(first.prompt)] != first.prompt:
        cause = "the template writes a question in another way once a turn follows it"
    else:
        after = second.prompt[len(first.prompt) :]
        place = next(i for i, token in enumerate(first.first.tokens) if after[i : i + 1] != [token])
        cause = (
            f"the turn is tokenized again: of its {len(first.first.tokens)} ids, the next prompt has the first {place}"
        )
    raise Differs(f"{cause}, so that it trains behind a history that it was not sampled behind", SEND_TOKENS)


async def _length(of: Examined) -> str:
    said = (await of.greedy(2)).first
    ended = said.tokens[-1:] == [of.chat.tokenizer.eos_id]
    if len(said.tokens) > 2 or (len(said.tokens) == 2 and not ended and said.finish != "length"):  # noqa: PLR2004
        raise Differs(
            f"expected 2 tokens that end by length, got {len(said.tokens)} that end by {said.finish!r}",
            "cut turns must be told from finished ones: use a server whose finish_reason is length",
        )
    return f"ends by {said.finish}"


async def _stop_string(of: Examined) -> str:
    free = (await of.server.complete(of.prompt, temperature=0, max_tokens=2 * TOKENS)).first
    pairs = (free.text[place : place + 2] for place in range(2, len(free.text)))
    stop = next((each for each in pairs if each.isprintable() and UNREADABLE not in each), "")
    if len(stop) < 2 or of.chat.tokenizer.decode(free.tokens).count(stop) == 0:  # noqa: PLR2004
        raise NotAsked("the model writes no text that could end it")
    said = (await of.server.complete(of.prompt, temperature=0, max_tokens=2 * TOKENS, stop=[stop])).first
    of.check_same(free.tokens[: len(said.tokens)], said.tokens, "turn", "report it to the server's project")
    if (
        said.finish != "stop"
        or len(said.tokens) == len(free.tokens) > of.chat.tokenizer.decode(free.tokens).find(stop) + 2
    ):
        raise Differs(f"the stop string {stop!r} does not end the turn", "leave it to the agent, or report it")
    if stop not in of.chat.tokenizer.decode(said.tokens):
        raise Differs(
            "the ids end before the stop string: the tokens that it was sampled as are lost",
            "end turns by stop_token_ids, or report it",
        )
    return f"{stop!r} ends it, and is in its ids"


async def _choices(of: Examined) -> str:
    answer = await of.server.chat(ASKED, n=3, temperature=HOT, max_tokens=TOKENS)
    if len(answer.choices) != 3:  # noqa: PLR2004
        raise Differs(f"expected 3 choices, got {len(answer.choices)}", "send a request for each, and no n")
    if all(each.tokens == answer.first.tokens for each in answer.choices):
        raise Differs("the 3 choices are one: they share a seed", "send a request for each, and no n")
    return "3 choices, each with its ids"


async def _stream(of: Examined) -> str:
    whole = (await of.greedy()).first.tokens
    streamed = await of.server.streamed(ASKED, temperature=0, max_tokens=TOKENS)
    if not streamed and whole:
        raise Differs("a stream has no token ids", "turn streaming off in the agent")
    of.check_same(whole, streamed, "streamed turn", "turn streaming off in the agent")
    return "equals the answer in one piece"


async def _seed(of: Examined) -> str:
    first, second = [
        (await of.server.chat(ASKED, temperature=HOT, seed=7, max_tokens=TOKENS)).first.tokens for _ in range(2)
    ]
    if first != second:
        raise Differs("two calls with one seed differ", "do not rely on repeatable rollouts at this server")
    return "two calls with one seed are equal"


async def _temperature(of: Examined) -> str:
    greedy, again = [(await of.greedy()).first.tokens for _ in range(2)]
    if greedy != again:
        raise Differs(
            "two calls at temperature 0 differ", "have the server compute alike in any batch: VLLM_BATCH_INVARIANT=1"
        )
    hot = [await of.server.chat(ASKED, temperature=HOT, seed=seed, max_tokens=TOKENS) for seed in (1, 2)]
    if all(each.first.tokens == greedy for each in hot):
        raise Differs(f"temperature is ignored: turns at {HOT:g} are those at 0", "set it where the server is started")
    prompt = of.prompt
    said = (await of.server.complete(prompt, temperature=0.5, seed=1, max_tokens=TOKENS, logprobs=0)).first
    raw = await of.server.raw_logprobs([*prompt, *said.tokens])
    if (
        raw is not None
        and said.logprobs
        and _apart(raw[len(prompt) - 1 :], said.logprobs) < NOISE / 10
        and sum(raw) < -1
    ):
        raise Differs(
            "log-probabilities at another temperature are those at temperature 1",
            "sample at 1, or start vLLM with --logprobs-mode processed_logprobs and use "
            "HttpPolicy(…, tempered_logprobs=True); else penstock leaves them out",
        )
    return "obeyed by each call"


async def _logprobs(of: Examined) -> str:
    prompt = of.prompt
    said = (await of.server.complete(prompt, temperature=1, seed=5, max_tokens=TOKENS, logprobs=0)).first
    raw = await of.server.raw_logprobs([*prompt, *said.tokens])
    if raw is not None:
        again, how = raw[len(prompt) - 1 :], "those of the same tokens in a prompt"
    else:
        again, how = [], "those of the same tokens one by one"
        said = (await of.server.complete(prompt, temperature=0, max_tokens=TOKENS, logprobs=0)).first
        for place, token in enumerate(said.tokens):
            asked = [*prompt, *said.tokens[:place]]
            one = (await of.server.complete(asked, temperature=0, max_tokens=1, logprobs=0)).first
            of.check_same([token], one.tokens, f"token {place} when it is asked for again", "see temperature")
            again += one.logprobs or []
    if said.logprobs is None or len(said.logprobs) != len(again):
        raise Differs(
            "expected a log-probability for each token, got another number", "use the trainer's own: none here"
        )
    apart = _apart(again, said.logprobs)
    if apart > NOISE:
        raise Differs(
            f"they are {apart:.3f} nats from {how}",
            "serve in a higher precision, without quantization, and with the default --logprobs-mode",
        )
    return f"{how}, within {apart:.1g} nats"


def _apart(first: Sequence[float], second: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(first, second, strict=False)), default=0.0)


# -- refusals ----------------------------------------------------------------------------------------------------------

OUT_OF_RANGE: Mapping[str, Any] = {"temperature": -1, "top_p": 7, "n": 0, "max_tokens": -1}


async def _refused(of: Examined) -> str:
    for field, value in OUT_OF_RANGE.items():
        fields = {"max_tokens": 1, field: value}
        await _expect_refusal(of, f"{field}={value}", CHAT, messages=ASKED, **fields)
    biased = of.prompt[0]
    try:
        said = await of.server.chat(ASKED, temperature=0, max_tokens=1, logit_bias={str(biased): 100})
    except RequestFailed as error:
        if error.status not in REFUSALS:
            raise
        return "values out of range, and logit_bias"
    if said.first.tokens != [biased]:
        raise Differs("logit_bias is accepted and ignored", "send no field that changes the sampling unseen")
    return "values out of range"


async def _expect_refusal(of: Examined, what: str, path: str, **fields: Any) -> str:
    try:
        await of.server.post(path, **fields)
    except RequestFailed as error:
        if error.status not in REFUSALS:
            raise Differs(
                f"{what} is answered by {error}", "agents repeat such requests: put penstock's endpoint in front"
            ) from None
        return str(error)
    raise Differs(f"{what} is accepted and ignored, or cut", "check parameters and lengths before they are sent")


async def _long_prompt(of: Examined) -> str:
    bound = of.server.longest or LONG
    if bound > LONGEST:
        raise NotAsked(f"the server tells a bound of {bound:g} tokens, more than are sent here")
    prompt = of.prompt[-1:] * (bound + 1)
    said = await _expect_refusal(of, "a prompt that is too long", TEXT, prompt=prompt, max_tokens=1)
    return f"refused: {said[:60]}…"


# -- all ---------------------------------------------------------------------------------------------------------------

PROGRAMS: Mapping[str, Program] = {
    "tokenizer": _tokenizer,
    "special tokens in a text": _special_tokens,
    "one turn": _one_turn,
    "system prompt and history": _system,
    "thinking in the history": _thinking,
    "tool call and result": _tool_call,
    "parallel tool calls": _parallel_calls,
    "malformed tool call": _malformed_call,
    "ids of an answer": _ids_of_answers,
    "tokens in and out": _tokens_in_and_out,
    "a continued turn": _continued_turn,
    "end by length": _length,
    "stop string": _stop_string,
    "n = 3": _choices,
    "stream": _stream,
    "seed": _seed,
    "temperature of a call": _temperature,
    "log-probabilities": _logprobs,
    "refused parameters": _refused,
    "too long prompt": _long_prompt,
}

BY_TOKENS = ("tokens in and out", "end by length", "stop string", "log-probabilities", "too long prompt")
"""Those on which `HttpPolicy` relies."""


async def examine(of: Examined, tell: Callable[[str], None]) -> list[Finding]:
    """Run the programs, and return their findings; the first that is not answered in time is the last.

    Args:
        of: examined.
        tell: called with the name of each program before it runs.

    Raises:
        EngineRefused: the server wants a key.
    """
    findings: list[Finding] = []
    for name, program in PROGRAMS.items():
        tell(name)
        try:
            findings.append(Finding(name, await program(of), "exact"))
        except NotAsked as error:
            findings.append(Finding(name, str(error), "unknown"))
        except Differs as error:
            findings.append(_differs(name, str(error), error.remedy))
        except TimeoutError:
            return [*findings, _differs(name, f"no answer within {of.timeout_s:g} s", "see the server's log")]
        except RequestFailed as error:
            if not findings and error.status in LOCKED:
                raise EngineRefused(f"{error}: set --key, or OPENAI_API_KEY, to a key of the server") from None
            remedy = "let the server do it, or have agents do without"
            findings.append(_differs(name, f"the server answers with {error}", remedy))
        except Exception as error:  # noqa: BLE001 (an answer may be wrong in any way; the other programs still run)
            cause = f"no answer that can be read: {type(error).__name__}: {' '.join(str(error).split())}"
            findings.append(_differs(name, cause[:LONGEST_CAUSE], "see the server's log"))
    return findings


def _differs(name: str, cause: str, remedy: str) -> Finding:
    return Finding(name, cause, "differs", cause, remedy)


def conclusion(findings: Sequence[Finding]) -> str:
    """Return the answer to the question whether agents can train through this server."""
    if unasked := len(PROGRAMS) - len(findings):
        return f"the server stopped answering: {unasked} of {len(PROGRAMS)} programs were not asked"
    differ = [each.name for each in findings if each.verdict == "differs"]
    if not differ:
        return "this server is token-exact: agents can train through it"
    counted = f"{len(differ)} of {len(findings)} differ"
    if set(differ) & set(BY_TOKENS):
        return f"agents cannot train through this server as it is: {counted}"
    return f"by tokens it is exact: sample by HttpPolicy, with penstock's endpoint in front of agents; {counted}"
