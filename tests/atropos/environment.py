"""An environment that talks to its server exactly as one of Atropos does, without Atropos.

    python -m tests.atropos.environment --url http://127.0.0.1:8000 --groups 20

A new connection for every request; JSON, compressed by gzip level 9 from 1 KiB on; registration that is asked for
until it is granted; `/status-env` polled by a GET with a body; workers that are begun, cancelled and requeued by what
it says; three tries with random waits, after which a group is dropped. Attributes and hooks have the names that Atropos
gives them, so what is written for its `BaseEnv` works here. Tests shorten all waits by one factor, `pace`.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import math
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import aiohttp

__all__ = ["Config", "Counts", "Environment", "scored_group"]

Scored: TypeAlias = dict[str, Any]

COMPRESSED_FROM_BYTES = 1024
COMPRESSION_LEVEL = 9

TRIES = 3
LONGEST_WAIT_S = 10.0
WORKER_TIMEOUT_S = 600.0

FAILED = 500
"""From this status on it is the server's fault, and worth another try."""

OPTIONAL = (
    "advantages",
    "ref_logprobs",
    "messages",
    "group_overrides",
    "overrides",
    "images",
    "distill_token_ids",
    "distill_logprobs",
)
"""Absent, they are empty where groups are made of items, as most environments do it."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of an environment; the names are Atropos'."""

    rollout_server_url: str
    wandb_name: str = "counting"
    group_size: int = 4
    inference_weight: float = 1.0
    min_batch_allocation: float | None = None
    max_token_length: int = 2048
    max_num_workers: int = 8
    max_batches_offpolicy: int = 3
    total_steps: int = 1_000_000
    use_wandb: bool = True
    ensure_scores_are_not_same: bool = True
    pace: float = 1.0
    """By how much all waits are multiplied: 1 waits as long as Atropos does."""


@dataclass
class Counts:
    """Counts of an environment's groups by outcome."""

    sent: int = 0
    """Accepted by the server, or refused."""
    refused: int = 0
    """Refused by the server with 4xx, and dropped."""
    dropped: int = 0
    """Dropped, for it failed at every try."""
    filtered: int = 0
    """Not sent, by the environment's own rules."""
    cancelled: int = 0
    """Workers that were cancelled, their items requeued."""
    pauses: int = 0
    cleanups: int = 0


def scored_group(item: int, group_size: int = 4, tokens: int = 24, **more: Any) -> Scored:
    """Return the group of prompt `item`: a prompt of a third of the tokens, completions, scores that differ."""
    draw, prompt = random.Random(item), tokens // 3  # noqa: S311 (tokens, not secrets)
    start = [draw.randrange(1, 32_000) for _ in range(prompt)]
    sequences = [start + [draw.randrange(1, 32_000) for _ in range(tokens - prompt)] for _ in range(group_size)]
    logprobs = [[1.0] * prompt + [-draw.random() for _ in range(tokens - prompt)] for _ in sequences]
    return {
        "tokens": sequences,
        "masks": [[-100] * prompt + sequence[prompt:] for sequence in sequences],
        "scores": [draw.random() for _ in sequences],
        "inference_logprobs": logprobs,
        **{name: {} if name == "group_overrides" else [] for name in OPTIONAL},
        **more,
    }


@dataclass(eq=False)
class Environment:
    """Runs until `groups` were accepted, or the trainer has had all its steps."""

    config: Config
    groups: int = sys.maxsize
    env_id: int | None = None
    curr_step: int = 0
    counts: Counts = field(default_factory=Counts)
    workers: dict[asyncio.Task[None], int] = field(default_factory=dict)
    """The item that each is busy with."""
    backlog: list[int] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    """The last answer of `/status-env`."""
    batch_size: int = 0
    server_max_token_len: int = 0
    _next: int = 0

    # -- what an environment of Atropos defines ------------------------------------------------------------------------

    async def setup(self) -> None:
        """Load data."""

    async def get_next_item(self) -> int:
        """Return the next prompt."""
        self._next += 1
        return self._next - 1

    async def collect_trajectories(self, item: int) -> tuple[Scored | list[Scored] | None, list[int]]:
        """Sample for a prompt; also, items that shall come again."""
        await asyncio.sleep(0)
        return scored_group(item, self.config.group_size), []

    async def cleanup(self) -> None:
        """Do nothing; called after every group, so a transport that is closed here fails with the second."""
        self.counts.cleanups += 1

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _request(self, method: str, path: str, **options: Any) -> Any:
        """Make one request, on a connection of its own."""
        url, timeout = self.config.rollout_server_url + path, aiohttp.ClientTimeout(total=60)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, url, **options) as response,
        ):
            response.raise_for_status()
            return await response.json()

    async def _tried(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        """Try three times, with growing random waits between."""
        for number in range(TRIES):
            try:
                return await attempt()
            except (aiohttp.ClientError, TimeoutError):
                if number == TRIES - 1:
                    raise
                longest = min(LONGEST_WAIT_S, 2.0**number)
                await self._sleep(random.uniform(0, longest))  # noqa: S311 (spreads retries)
        raise AssertionError

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.config.pace)

    async def setup_wandb(self) -> None:
        """Wait until the trainer has said how its run is called."""
        while (await self._request("GET", "/wandb_info")).get("group") is None:
            await self._sleep(1.0)

    async def _register_env(self) -> dict[str, Any]:
        config = self.config
        asked = {
            "max_token_length": config.max_token_length,
            "desired_name": config.wandb_name,
            "weight": config.inference_weight,
            "min_batch_allocation": config.min_batch_allocation,
            "group_size": config.group_size,
        }
        answer: dict[str, Any] = await self._tried(lambda: self._request("POST", "/register-env", json=asked))
        return answer

    async def register_env(self) -> None:
        """Ask for an id until there is one: that is when the trainer has asked for its first batch."""
        while (answer := await self._register_env()).get("status") != "success":
            await self._sleep(1.0)
        self.env_id, self.curr_step = answer["env_id"], answer["starting_step"]

    async def get_server_info(self) -> None:
        """Read the batch size from the server; groups have to fit."""
        info = await self._request("GET", "/info")
        self.batch_size, self.server_max_token_len = info["batch_size"], info["max_token_len"]
        if self.config.group_size > self.batch_size:
            raise ValueError(f"group_size {self.config.group_size} is more than batch_size {self.batch_size}")

    async def get_status(self) -> None:
        """Ask how deep the queue is: by GET, with a body."""
        asked = {"env_id": self.env_id}
        self.status = await self._tried(lambda: self._request("GET", "/status-env", json=asked))
        self.curr_step = self.status["current_step"]

    # -- sending -------------------------------------------------------------------------------------------------------

    async def handle_send_to_api(self, scored: Scored | list[Scored] | None) -> None:
        """Filter groups, and send the rest; a group that fails finally is dropped."""
        groups = scored if isinstance(scored, list) else [] if scored is None else [scored]
        kept = [group for group in groups if self._wanted(group)]
        self.counts.filtered += len(groups) - len(kept)
        if not kept:
            return
        try:
            await self._send_scored_data_to_api(kept if isinstance(scored, list) else kept[0])
        except Exception as error:  # noqa: BLE001 (as Atropos does it: whatever it was)
            print(f"dropped: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
            self.counts.dropped += len(kept)
        else:
            self.counts.sent += len(kept)

    def _wanted(self, group: Scored) -> bool:
        size = (group.get("group_overrides") or {}).get("group_size", self.config.group_size)
        if len(group["tokens"]) != size:
            return False
        if self.config.ensure_scores_are_not_same and len(set(group["scores"])) == 1:
            return False
        return all(len(tokens) < self.server_max_token_len for tokens in group["tokens"])

    async def _send_scored_data_to_api(self, scored_data: Scored | list[Scored]) -> None:
        """Send groups, after all filters."""
        groups = scored_data if isinstance(scored_data, list) else [scored_data]
        for group in groups:
            group["env_id"] = self.env_id
        path = "/scored_data_list" if isinstance(scored_data, list) else "/scored_data"
        body, headers = json.dumps(scored_data).encode(), {"Content-Type": "application/json"}
        if len(body) >= COMPRESSED_FROM_BYTES:
            body, headers["Content-Encoding"] = gzip.compress(body, COMPRESSION_LEVEL), "gzip"
        if not await self._tried(lambda: self._accepted(path, body, headers)):
            self.counts.refused += len(groups)

    async def _accepted(self, path: str, body: bytes, headers: dict[str, str]) -> bool:
        try:
            await self._request("POST", path, data=body, headers=headers)
        except aiohttp.ClientResponseError as error:
            if error.status >= FAILED:
                raise
            print(f"refused: {error}", file=sys.stderr)  # noqa: T201
            return False
        return True

    # -- workers -------------------------------------------------------------------------------------------------------

    async def handle_env(self, item: int) -> None:
        """Handle one item, from the prompt to the server."""
        scored, again = await self.collect_trajectories(item)
        self.backlog.extend(again)
        await self.handle_send_to_api(scored)
        await self.cleanup()

    async def _worker(self, item: int) -> None:
        try:
            await asyncio.wait_for(self.handle_env(item), WORKER_TIMEOUT_S * self.config.pace)
        except TimeoutError:
            self.counts.dropped += 1

    @property
    def target(self) -> int:
        """Return the number of workers for the server's last status."""
        config, said = self.config, self.status
        ahead = self._fed * config.max_batches_offpolicy // config.group_size
        wanted = min(config.max_num_workers, ahead - int(said["queue_size"]))
        if config.min_batch_allocation is None:
            return wanted
        largest: int = said["max_group_size"]
        packs = self._minimum_packs + largest // config.group_size
        queued: float = largest * said["self_queue_size"] // (largest / config.group_size)
        return max(wanted, 0, math.ceil((packs * largest - queued) / config.group_size))

    @property
    def _fed(self) -> int:
        """Return the number of sequences of a batch that this environment has to fill."""
        share: float = self.status["unallocated_fraction"] + (self.config.min_batch_allocation or 0.0)
        return int(self.batch_size * share)

    @property
    def _minimum_packs(self) -> int:
        config = self.config
        minimum = (config.min_batch_allocation or 0.0) * self.batch_size * config.max_batches_offpolicy
        return math.ceil(minimum / int(self.status["max_group_size"]))

    @property
    def paused(self) -> bool:
        """Return whether the queue is deep enough."""
        config, said = self.config, self.status
        deep = said["queue_size"] * config.group_size >= config.max_batches_offpolicy * self.batch_size
        if deep and config.min_batch_allocation is not None:
            own = self._minimum_packs * (said["max_group_size"] // config.group_size)
            deep = own - said["self_queue_size"] <= 0
        return bool(deep)

    @property
    def done(self) -> bool:
        """Return whether the trainer needs no more groups, or this environment has sent all of its groups."""
        if self.counts.sent >= self.groups:
            return True
        if not self.status:
            return False
        batches = self.status["queue_size"] * self.config.group_size // self.batch_size
        return bool(self.curr_step + batches > self.config.total_steps)

    async def add_train_workers(self) -> None:
        """Begin or cancel workers, up to the target."""
        if self.paused:
            self.counts.pauses += 1
            await self._cancel(len(self.workers))
            return
        if len(self.workers) > self.target:
            await self._cancel(len(self.workers) - max(0, self.target))
        while len(self.workers) < self.target and self.counts.sent + len(self.workers) < self.groups:
            item = self.backlog.pop() if self.backlog else await self.get_next_item()
            worker = asyncio.create_task(self._worker(item))
            self.workers[worker] = item
            worker.add_done_callback(lambda ended: self.workers.pop(ended, None))

    async def _cancel(self, count: int) -> None:
        """Cancel the newest workers; what they were busy with comes again."""
        ending = [worker for worker in list(self.workers)[len(self.workers) - count :] if not worker.done()]
        self.backlog.extend(self.workers[worker] for worker in ending)
        self.counts.cancelled += len(ending)
        for worker in ending:
            worker.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def env_manager(self) -> None:
        """Run the environment from registration to the end."""
        await self.setup()
        if self.config.use_wandb:
            await self.setup_wandb()
        await self.register_env()
        await self.get_server_info()
        await self._sleep(5.0)
        while not self.done:
            await self._sleep(0.1)
            await self.get_status()
            await self.add_train_workers()
        await self._cancel(len(self.workers))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--url", required=True, help="of the server")
    parser.add_argument("--groups", type=int, required=True, help="how many to give")
    parser.add_argument("--name", default="counting")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--weight", type=float, default=1.0)
    parser.add_argument("--minimum", type=float, help="share of every batch")
    parser.add_argument("--workers", type=int, default=8, help="at most")
    parser.add_argument("--pace", type=float, default=1.0, help="by how much waits are multiplied")
    parser.add_argument("--shm", action="store_true", help="send through shared memory")
    return parser.parse_args()


def main() -> None:
    """Run the command line, and print the counts as JSON at the end."""
    arguments = _arguments()
    config = Config(
        rollout_server_url=arguments.url,
        wandb_name=arguments.name,
        group_size=arguments.group_size,
        inference_weight=arguments.weight,
        min_batch_allocation=arguments.minimum,
        max_num_workers=arguments.workers,
        pace=arguments.pace,
    )
    environment = Environment(config, arguments.groups)
    if arguments.shm:
        from penstock.integrations.atropos import ShmTransport  # noqa: PLC0415 (the others need no penstock)

        ShmTransport.attach(environment)
    asyncio.run(environment.env_manager())
    print(json.dumps(asdict(environment.counts)))  # noqa: T201


if __name__ == "__main__":
    main()
