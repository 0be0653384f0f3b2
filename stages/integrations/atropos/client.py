"""AtroposClient: a source that acts as the trainer of a server of the Atropos contract: the original one, or a gateway.

It registers, and asks for batches until it has received all that it registered for. After a restart of the server it
registers again, with its current step. A gateway keeps a batch until this client acknowledges that all of it has ended;
the original server forgets it as soon as it has answered.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import anyio
import msgspec
from anyio.abc import TaskGroup

from ...._pipeline.accounting.repetition_sets import mask_of
from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.channels.channel import SendChannel
from ...._pipeline.errors import InvalidConfig
from ...._pipeline.graph.context import current
from ...._pipeline.graph.stage_info import StageInfo
from ...._pipeline.util.exception_groups import unwrap_single
from ...._schemas import InvalidRecord, TrajectoryGroup, TrajectoryId
from ...._schemas.config import Config, check_url, load_config, parse_config
from ...._schemas.numbers import normalize_counts, normalize_numbers
from ...http.retry import UNLIMITED, Backoff, jitter
from .api_error import AtroposAPIError, without_token
from .contract import BatchAnswer, TrainerRegistration, decode_scored
from .http_extra import load_http_api
from .translation import to_group

if TYPE_CHECKING:
    from .http_api import HttpApi

log = get_logger("penstock.atropos_client")

ACKNOWLEDGE_TIMEOUT_S = 5.0
"""Bound on the acknowledgement of the last batches, when the run ends."""

POLLS = Backoff(UNLIMITED, 0.25, 8.0)
"""Pauses between requests for a batch while there is none."""


class AtroposClient(Config, frozen=True):
    """Receive groups from a server of the Atropos contract, as its trainer.

    `from_yaml` and `from_config`, but not the constructor, read the variables ATROPOS_API_URL and ATROPOS_TIMEOUT.

    >>> AtroposClient(batch_size=16, max_token_len=2048, num_steps=100).api_url
    'http://127.0.0.1:8000'

    Raises:
        InvalidConfig: a number is out of its range, or `api_url` is not an address.
    """

    batch_size: int
    """Sequences of a batch."""
    max_token_len: int
    """Tokens of the longest sequence that is trained."""
    num_steps: int
    """Batches of the whole training, those before `starting_step` included; then the stream ends."""
    starting_step: int = 0
    """Step that a resumed training continues from: `TorchTrainer.steps`."""
    api_url: str = "http://127.0.0.1:8000"
    token: str | None = None
    """Sent as a bearer token; by default PENSTOCK_TOKEN."""
    ca: str | None = None
    """File with the certificates of a CA for https://, in PEM; None for those of the system."""
    request_timeout_s: float = 30.0
    """Bound on one attempt at a request; transient failures are retried, up to eight attempts in all."""
    reconnect_timeout_s: float = 300.0
    """Bound on the time without an answer from a server that has answered before."""
    batch_timeout_s: float | None = 3600.0
    """Bound on the time without a batch while the server answers; None for no bound."""
    lease_s: float | None = 1800.0
    """Time that a gateway waits for the acknowledgement of a batch before it leases it again: more than the longest
    time from poll to optimizer step. Groups that were received before are not trained again. None for at most once, as
    with the original."""
    candidates: int | None = None
    """Width of a teacher's columns; see `to_group`. The most that any group has, where groups bring candidates."""
    wandb_group: str = ""
    """Sent to environments, like the fields below."""
    wandb_project: str = ""
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = 0

    def stage_info(self) -> StageInfo:
        """State that it acknowledges trained batches."""
        return StageInfo(follows_trajectories=True)

    def __post_init__(self) -> None:
        normalize_counts(self, "batch_size", "max_token_len", "candidates")
        normalize_counts(self, "num_steps", "starting_step", "save_checkpoint_interval", least=0)
        normalize_numbers(self, "request_timeout_s", "batch_timeout_s", "lease_s")
        normalize_numbers(self, "reconnect_timeout_s", zero=True)
        if self.num_steps < self.starting_step:
            raise InvalidConfig(
                f"num_steps: expected at least starting_step, {self.starting_step}, got {self.num_steps}"
            )
        check_url(self.api_url, "api_url")
        if self.token is not None and urlsplit(self.api_url).username is not None:
            raise InvalidConfig("token: expected none beside the one in api_url, got one")

    def __repr__(self) -> str:
        return f"<AtroposClient of {without_token(self.api_url)}, steps {self.starting_step} to {self.num_steps}>"

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> Self:
        """Return the client described by a mapping, as YAML or JSON would give it.

        ATROPOS_API_URL and ATROPOS_TIMEOUT, if set, take the place of `api_url` and `request_timeout_s`.

        Raises:
            InvalidConfig: it does not fit; the message gives the path of the value, the expected type and the value.
        """
        return parse_config(cls, values, root="atropos")._with_variables()  # noqa: SLF001 (its own)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Return the client that a YAML file describes; as `from_config`."""
        return load_config(cls, path, root="atropos")._with_variables()  # noqa: SLF001 (its own)

    def _with_variables(self) -> Self:
        url = os.environ.get("ATROPOS_API_URL") or self.api_url
        try:
            timeout_s = float(os.environ.get("ATROPOS_TIMEOUT") or self.request_timeout_s)
            return type(self)(**(msgspec.structs.asdict(self) | {"api_url": url, "request_timeout_s": timeout_s}))
        except ValueError as error:
            raise InvalidConfig(f"ATROPOS_API_URL, ATROPOS_TIMEOUT: {error}") from None

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Source`. After the last batch it waits until all batches have ended and are acknowledged.

        Raises:
            AtroposAPIError: the server does not answer as it should.
            MissingExtra: aiohttp is not installed.
        """
        http_api = load_http_api("AtroposClient")
        timeouts = {"request_timeout_s": self.request_timeout_s, "reconnect_timeout_s": self.reconnect_timeout_s}
        with unwrap_single():
            async with (
                http_api.open(self.api_url, token=self.token, ca=self.ca, **timeouts) as api,
                anyio.create_task_group() as tasks,
            ):
                await _Training(self, api, outbox, tasks).run()
                await outbox.aclose()


class _Training:
    """One training, from its registration to the last batch."""

    def __init__(
        self, config: AtroposClient, api: HttpApi, outbox: SendChannel[TrajectoryGroup], tasks: TaskGroup
    ) -> None:
        self._config = config
        self._api = api
        self._outbox = outbox
        self._tasks = tasks
        self._step = config.starting_step
        """Batches received, those before this training included."""
        self._name = secrets.token_hex(4)
        """Part of every instance id, so that ids are unique among trainings."""
        self._numbers = count()
        """Of batches without an id."""
        self._sent: dict[str, list[TrajectoryId]] = {}
        """Trajectories of each batch with an id; empty once all have ended."""

    async def run(self) -> None:
        """Send every batch, to the last one."""
        await self._api.check_server()
        await self._register()
        while self._step < self._config.num_steps:
            await self._send(await self._next())

    async def _register(self) -> None:
        fields: dict[str, Any] = {name: getattr(self._config, name) for name in TrainerRegistration.__struct_fields__}
        fields["starting_step"] = self._step
        await self._api.register(TrainerRegistration(**fields))

    async def _next(self) -> BatchAnswer:
        """Return the next batch; the pauses between requests grow while there is none."""
        config = self._config
        began = empty_since = time.monotonic()
        pauses = POLLS.pauses(jitter(current().worker))
        while True:
            failures, asked_at = self._api.failures, time.monotonic()
            answer = await self._api.batch(config.lease_s)
            if answer.status == "error":
                log.warning("trainer_unregistered", url=without_token(config.api_url), step=self._step)
                await self._register()
            elif answer.batch:
                current().metrics.mean("timing_s/atropos_wait", time.monotonic() - began)
                return answer
            if answer.status == "error":
                empty_since = time.monotonic()
            elif self._api.failures > failures:  # while the server is unreachable, its queue is not known to be empty
                empty_since += time.monotonic() - asked_at
            if config.batch_timeout_s is not None and time.monotonic() - empty_since > config.batch_timeout_s:
                raise self._api.empty(config.batch_timeout_s)
            await anyio.sleep(next(pauses))

    async def _send(self, answer: BatchAnswer) -> None:
        """Send the groups of a batch, one after another: each is decoded while the one before is in transit.

        The batch counts as a step unless all of it was sent before, in this run or in the one that it continues.
        """
        name = f"{self._name}.{next(self._numbers)}" if answer.batch_id is msgspec.UNSET else answer.batch_id
        duplicate = name in self._sent
        sent = self._sent.get(name, [])
        new = 0 if duplicate else await self._send_new(answer, name, sent)
        if not duplicate and answer.batch_id is not msgspec.UNSET:
            self._sent[name] = sent
        if duplicate or (sent and not new):
            log.warning("duplicate_batch", batch=name)
            current().metrics.total("atropos/duplicates")
        self._step += not duplicate and (new > 0 or not sent)
        if answer.lease is not msgspec.UNSET:
            self._tasks.start_soon(self._acknowledge, answer.lease, sent, self._step == self._config.num_steps)

    async def _send_new(self, answer: BatchAnswer, name: str, sent: list[TrajectoryId]) -> int:
        """Send the groups that the ledger does not know, and return their number; `sent` is filled with all."""
        new = 0
        for number, piece in enumerate(answer.batch or ()):
            try:
                group = self._group(bytes(piece), f"{name}.{number}")
            except InvalidRecord as error:  # the others of the batch can be trained on
                log.warning("group_refused", url=without_token(self._config.api_url), reason=str(error))
                current().metrics.total("atropos/refused")
                continue
            sent += group.ids
            if mask_of(group.rollout_ids.tolist()) & ~current().ledger.trajectories.known(group.id):
                new += 1
                await self._outbox.send(group)
            del group  # the next stage owns it
        return new

    def _group(self, piece: bytes, instance_id: str) -> TrajectoryGroup:
        (scored,) = decode_scored(piece)
        return to_group(
            scored,
            env="atropos" if scored.env_id is None else f"atropos.{scored.env_id}",
            instance_id=instance_id,
            policy_version=current().ledger.step,
            candidates=self._config.candidates,
        )

    async def _acknowledge(self, lease: int | str, sent: list[TrajectoryId], last: bool) -> None:  # noqa: FBT001
        """Acknowledge a batch when all of it has ended, also where that ended the run."""
        ledger = current().ledger
        try:
            for trajectory in sent:
                await ledger.ended(trajectory.group)
        finally:
            if not any(map(ledger.trajectories.is_open, sent)):
                sent.clear()
                with anyio.move_on_after(ACKNOWLEDGE_TIMEOUT_S, shield=True):
                    await self._end_lease(lease, last=last)

    async def _end_lease(self, lease: int | str, *, last: bool) -> None:
        try:
            if last:  # the server's count may differ after a duplicate batch: this client's is right
                await self._register()
            await self._api.acknowledge(lease)
        except AtroposAPIError as error:  # at worst the batch is sent once more
            log.warning("not_acknowledged", lease=lease, reason=error.summary)
            current().metrics.total("atropos/not_acknowledged")
