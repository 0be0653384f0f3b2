"""The processes of `benchmarks.atropos_load`: environments that number their groups, and a trainer that records them.

Both write records into files, line by line, because they may be killed at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from tests.atropos.environment import Config, Environment, Scored, scored_group

__all__ = ["GROUP_SIZE", "KINDS", "Kind", "Numbered", "Trainer", "config_of", "kind_of", "waiting_groups"]

GROUP_SIZE = 4

BATCHES_AHEAD = 10
"""Environments pause when so many batches wait: with the default 3, no queue contains two groups of each of 64."""

LEASE_S = 3.0


class Kind(NamedTuple):
    """The options of some of the environments."""

    weight: float
    minimum: float | None


KINDS = (Kind(1.0, 1 / 64), Kind(1.0, None), Kind(2.0, None), Kind(4.0, None))
"""Kinds of a quarter of the environments each."""


def kind_of(index: int) -> Kind:
    """Return the kind of environment `index`."""
    return KINDS[index % len(KINDS)]


def config_of(index: int, url: str, pace: float) -> Config:
    """Return the configuration of environment `index`."""
    kind = kind_of(index)
    return Config(
        rollout_server_url=url,
        wandb_name=f"load-{index}",
        group_size=GROUP_SIZE,
        inference_weight=kind.weight,
        min_batch_allocation=kind.minimum,
        max_batches_offpolicy=BATCHES_AHEAD,
        pace=pace,
    )


@dataclass(eq=False)
class Numbered(Environment):
    """Begins each sequence with its own number and that of the group, and records accepted groups."""

    index: int = 0
    tokens: int = 64
    accepted: Path = field(default_factory=Path)
    _serial: int = 0

    async def collect_trajectories(self, item: int) -> tuple[Scored | list[Scored] | None, list[int]]:
        """Return a group with unique numbers."""
        await asyncio.sleep(0)
        scored, self._serial = scored_group(item, GROUP_SIZE, self.tokens), self._serial + 1
        for row in scored["tokens"]:
            row[:2] = [self.index, self._serial]
        return scored, []

    async def _send_scored_data_to_api(self, scored_data: Scored | list[Scored]) -> None:
        assert isinstance(scored_data, dict)  # noqa: S101 (it makes no lists)
        refused = self.counts.refused
        await super()._send_scored_data_to_api(scored_data)
        if self.counts.refused == refused:
            note(self.accepted, scored_data["tokens"][0][:2])

    async def run(self) -> None:
        """Run, and restart after errors of the server: the trainer ends a run."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                await self.env_manager()
            await self._sleep(1.0)


class Trainer:
    """Registers, polls, and records every group that arrives."""

    def __init__(self, url: str, notes: Path, *, leased: bool, batch_size: int, step_s: float) -> None:
        host = urlsplit(url)
        self.connection = http.client.HTTPConnection(str(host.hostname), host.port, timeout=60)
        self._notes = notes
        self._path = f"/batch?lease_s={LEASE_S}" if leased else "/batch"
        self._batch_size = batch_size
        self._step_s = step_s

    def run(self, done: Callable[[float], bool]) -> None:
        """Train until `done`, which receives the seconds without a batch."""
        about = {"wandb_group": "load", "wandb_project": "load", "checkpoint_dir": "", "save_checkpoint_interval": -1}
        numbers = {"batch_size": self._batch_size, "max_token_len": 4096, "starting_step": 0, "num_steps": 2**31 - 1}
        self._request("POST", "/register", about | numbers)
        last = time.monotonic()
        while not done(time.monotonic() - last):
            waiting = waiting_groups(self._request("GET", "/status"))
            note(self._notes, "asking")
            reply = json.loads(self._request("GET", self._path))
            groups = [group["tokens"][0][:2] for group in reply["batch"] or ()]
            note(self._notes, {"groups": groups, "waiting": sorted(waiting.items())})
            if "lease" in reply:
                self._request("POST", "/acknowledge", {"lease": reply["lease"]})
            if groups:
                last = time.monotonic()
            time.sleep(self._step_s if groups else 0.05)

    def _request(self, method: str, path: str, body: Any = None) -> str:
        sent = None if body is None else json.dumps(body).encode()
        self.connection.request(method, path, sent, {"Content-Type": "application/json"})
        return self.connection.getresponse().read().decode()


def waiting_groups(status: str) -> Counter[int]:
    """Return how many groups of each environment wait, of those that have some; `load-7_1` is one of number 7."""
    found: Counter[int] = Counter()
    for env in json.loads(status)["environments"]:
        found[int(env["name"].removeprefix("load-").partition("_")[0])] += env["queued"] // GROUP_SIZE
    return +found


def note(path: Path, what: Any) -> None:
    """Append a line, which survives if the process is killed immediately afterwards."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, json.dumps(what).encode() + b"\n")
    finally:
        os.close(file)
