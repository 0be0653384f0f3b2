"""`BlockingAgentClient`: the client of an agent that blocks, in a process of its own. It calls the endpoint by HTTP."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from .agent_client import EndpointAddress


class BlockingAgentClient(msgspec.Struct, frozen=True, kw_only=True):
    """The policy, as an agent in a process of its own calls it; see `AgentClient`.

    Give `base_url` and `api_key` to a client of OpenAI or Anthropic, or `env` to a command.
    """

    address: EndpointAddress
    repetition: int
    """Number of the rollout among those of its prompt."""
    deadline_s: float
    """Time at which the rollout is given up, and this process ended, on the clock `time.monotonic`."""

    @property
    def base_url(self) -> str:
        """Return the URL of OpenAI's API for this rollout, on loopback."""
        return self.address.base_url

    @property
    def api_key(self) -> str:
        """Return the key of the rollout."""
        return self.address.api_key

    @property
    def env(self) -> dict[str, str]:
        """Return environment variables for an agent's command, OPENAI_BASE_URL and others."""
        return self.address.env

    def chat(self, messages: Sequence[Any], **fields: Any) -> Any:
        """Return the policy's turn after `messages`, a message of the assistant as a `dict`.

        Args:
            messages: those of OpenAI's chat completions.
            fields: other fields of the request: `tools`, `temperature`, `max_tokens`.

        Raises:
            OSError: the endpoint refused the request; the message has its reason.
        """
        answer = self._post("/v1/chat/completions", {"messages": list(messages), **fields})
        return answer["choices"][0]["message"]

    def generate(self, prompt: Sequence[int], **sampling: Any) -> Any:
        """Return the policy's completion of the token ids `prompt`: its `token_ids` and `finish_reason`, as a `dict`.

        Args:
            prompt: all tokens of the call, at least one.
            sampling: `max_tokens`, `temperature` and others, as vLLM has them.

        Raises:
            OSError: the endpoint refused the request; the message has its reason.
        """
        request = {"token_ids": list(prompt), "sampling_params": sampling}
        return self._post("/inference/v1/generate", request)["choices"][0]

    def reward(self, value: float, *, call: str | None = None) -> None:
        """Add `value` to the reward of the rollout, or to that of a call, by the id of its answer.

        Raises:
            OSError: the endpoint refused it; the message has its reason.
        """
        self._post("/v1/reward", {"value": value, "call": call})

    def another(self) -> BlockingAgentClient:
        """Return another client of the same rollout, with a key and histories of its own; see `AgentClient.another`.

        Raises:
            OSError: the endpoint refused it; the message has its reason.
        """
        given = self._post("/v1/clients", None)
        return msgspec.structs.replace(self, address=EndpointAddress(**given))

    def _post(self, path: str, body: Any) -> Any:
        url = urlsplit(self.address.base_url)
        connection = http.client.HTTPConnection(url.hostname or "", url.port)
        try:
            connection.request(
                "POST",
                url.path.removesuffix("/v1") + path,
                msgspec.json.encode(body),
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise OSError(f"POST {path}: {answer.status} {content.decode(errors='replace')}")
        return msgspec.json.decode(content)
