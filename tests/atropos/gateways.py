"""Gateways for tests: processes of `penstock gateway`, and a client that sends only given headers."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.failsafe import FAILSAFE_S
from tests.warned import strict

COMMAND = [sys.executable, "-c", "from penstock._cli import main; main()", "gateway"]

TRAINER = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 8,
    "max_token_len": 2048,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 5,
    "starting_step": 3,
    "num_steps": 100,
}


def environment(name: str = "sums", **other: Any) -> dict[str, Any]:
    """Return the registration of an environment."""
    return {"max_token_length": 2048, "desired_name": name, "weight": 1.0, "group_size": 4} | other


def scored(sequences: int = 4, env_id: int | None = None, *, mark: float = 0.0, **other: Any) -> dict[str, Any]:
    """Return a group of sequences of three tokens, with scores from `mark` on."""
    return {
        "tokens": [[5, 6, 7]] * sequences,
        "masks": [[-100, 6, 7]] * sequences,
        "scores": [mark + index for index in range(sequences)],
        "env_id": env_id,
    } | other


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Return the body, inflated if it is compressed."""
        body = gzip.decompress(self.body) if self.headers.get("content-encoding") == "gzip" else self.body
        return json.loads(body)


class Client:
    """Talks to one gateway, on one connection."""

    def __init__(self, url: str, **headers: str) -> None:
        host = urlsplit(url)
        self.url = url
        self._headers = headers
        self._connection = http.client.HTTPConnection(str(host.hostname), host.port, timeout=FAILSAFE_S)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Make one request; a body that is not bytes is sent as JSON."""
        sent = {name.replace("_", "-"): value for name, value in (self._headers | headers).items()}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            sent.setdefault("content-type", "application/json")
        self._connection.request(method, path, body, sent)
        response = self._connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read())

    def get(self, path: str, body: Any = None, **headers: str) -> Any:
        """Return the answer to a GET request."""
        return self._good(self.ask("GET", path, body, **headers))

    def post(self, path: str, body: Any, **headers: str) -> Any:
        """Return the answer to a POST request."""
        return self._good(self.ask("POST", path, body, **headers))

    def progress(self) -> tuple[int, int]:
        """Return the step and the number of waiting groups."""
        status = self.get("/status")
        return status["current_step"], status["queue_size"]

    def _good(self, answer: Answer) -> Any:
        assert answer.status == 200, answer
        return answer.json

    def started(self, **trainer: Any) -> None:
        """Register a trainer and request its first batch, so that environments are admitted."""
        self.post("/register", TRAINER | trainer)
        assert self.get("/batch") == {"batch": None}


@contextmanager
def process(*options: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a gateway, and yield it with its URL. It ends after the body, by SIGTERM, in time and with status 0."""
    command = [*COMMAND, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=strict(os.environ | variables)) as running:
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            assert line.startswith("listening at "), line
            yield running, line.removeprefix("listening at ").strip()
            if running.poll() is None:
                running.terminate()
                assert running.wait(timeout=FAILSAFE_S) == 0
        finally:
            running.kill()


@contextmanager
def client(url: str, **headers: str) -> Iterator[Client]:
    """Yield a client of the gateway at `url`."""
    with closing(Client(url, **headers)) as talking:
        yield talking
