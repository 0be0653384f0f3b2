"""AtroposClient: a source that is a trainer to a server of the Atropos contract: the original one, or a gateway.

It registers, and asks for batches until it has had all that it registered for. A server that was restarted knows it no
more: it registers again, with the step that it has come to. A gateway keeps a batch until this client says that all of
it has ended; the original server forgets it the moment it has answered.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import anyio
import msgspec
from anyio.abc import TaskGroup

from ....pipeline.causes import alone
from ....pipeline.channels.channel import SendChannel
from ....pipeline.context import current
from ....pipeline.errors import InvalidConfig, MissingExtra
from ....pipeline.repetitions import mask_of
from ....pipeline.telemetry import get_logger
from ....schemas import InvalidRecord, TrajectoryGroup, TrajectoryId
from ....schemas.config import Config, check_url, load_config, parse_config
from ....schemas.numbers import normalize_counts, normalize_numbers
from ...engines.backoff import Backoff, jitter
from ...engines.retrying import WITHOUT_END
from .api_error import AtroposAPIError, shown
from .contract import BatchAnswer, TrainerRegistration, decode_scored
from .translation import to_group

if TYPE_CHECKING:
    from .api import Api

__all__ = ["AtroposClient"]

log = get_logger("penstock.atropos_client")

LEAVING_S = 5.0
"""How long a server may take to hear what became of the last batches, when the run ends."""


class AtroposClient(Config, frozen=True):
    """Receive groups from a server of the Atropos contract, as the trainer that it serves.

    Made by its constructor, it is what that was told; only `from_yaml` and `from_config` heed ATROPOS_API_URL and
    ATROPOS_TIMEOUT.

    >>> AtroposClient(batch_size=16, max_token_len=2048, num_steps=100).api_url
    'http://127.0.0.1:8000'

    Raises:
        ValueError: a number that makes no sense, or an address that is none.
    """

    batch_size: int
    """Sequences of a batch."""
    max_token_len: int
    """Tokens of the longest sequence that is trained."""
    num_steps: int
    """Batches of the whole training, those before `starting_step` included; then the stream ends."""
    starting_step: int = 0
    """Where a training that goes on goes on: `TorchTrainer.steps`."""
    api_url: str = "http://127.0.0.1:8000"
    token: str | None = None
    """Sent as a bearer token."""
    timeout_s: float = 30.0
    """How long one request may take."""
    attempts: int = 8
    """How often a request is tried that fails in passing."""
    away_s: float = 300.0
    """How long a server may be away that was there: it is started anew, or the network is. A server that is not there
    at the start is tried `attempts` times."""
    first_pause_s: float = 0.25
    """Bound of the first pause, between attempts and between polls; it doubles from pause to pause."""
    longest_pause_s: float = 8.0
    """No bound is above it."""
    empty_s: float | None = 3600.0
    """How long there may be no batch while the server is there; None for as long as it takes."""
    lease_s: float | None = 1800.0
    """How long a gateway waits to hear that all of a batch has ended, before it gives it out again: more than the
    longest time from poll to optimizer step. What came before is not trained again. None for at most once, as with the
    original."""
    candidates: int | None = None
    """Width of a teacher's columns; see `to_group`. The most that any group has, where groups bring candidates."""
    wandb_group: str = ""
    """What environments are told, as the fields below."""
    wandb_project: str = ""
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = 0

    def __post_init__(self) -> None:
        normalize_counts(self, "batch_size", "max_token_len", "attempts", "candidates")
        normalize_counts(self, "num_steps", "starting_step", "save_checkpoint_interval", least=0)
        normalize_numbers(self, "timeout_s", "empty_s", "lease_s")
        normalize_numbers(self, "first_pause_s", "longest_pause_s", "away_s", zero=True)
        if self.num_steps < self.starting_step:
            raise ValueError(f"num_steps: expected at least starting_step, {self.starting_step}, got {self.num_steps}")
        check_url(self.api_url, "api_url")
        if self.token is not None and urlsplit(self.api_url).username is not None:
            raise ValueError("token: expected none beside the one in api_url, got one")

    def __repr__(self) -> str:
        return f"<AtroposClient of {shown(self.api_url)}, steps {self.starting_step} to {self.num_steps}>"

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> Self:
        """The client that a mapping describes, as YAML or JSON would give it.

        ATROPOS_API_URL and ATROPOS_TIMEOUT count more, where they are set: whoever starts a run says where.

        Raises:
            InvalidConfig: it does not fit; the message gives the path of the value, what was expected and came.
        """
        return parse_config(cls, values, root="atropos")._here()  # noqa: SLF001 (its own)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """The client that a YAML file describes; as `from_config`."""
        return load_config(cls, path, root="atropos")._here()  # noqa: SLF001 (its own)

    def _here(self) -> Self:
        """The same, as the variables of this process say."""
        said: dict[str, Any] = {}
        if url := os.environ.get("ATROPOS_API_URL"):
            said["api_url"] = url
        if timeout := os.environ.get("ATROPOS_TIMEOUT"):
            try:
                said["timeout_s"] = float(timeout)
            except ValueError:
                raise InvalidConfig(f"ATROPOS_TIMEOUT: expected seconds, got {timeout!r}") from None
        try:
            return type(self)(**(msgspec.structs.asdict(self) | said))
        except ValueError as error:
            raise InvalidConfig(f"ATROPOS_API_URL, ATROPOS_TIMEOUT: {error}") from None

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Source`. When the last batch was sent it stays until the server has heard what became of it.

        Raises:
            AtroposAPIError: the server does not answer as it should.
            MissingExtra: aiohttp is not installed.
        """
        draw = jitter(current().worker)
        backoff = Backoff(self.attempts, self.first_pause_s, self.longest_pause_s)
        times = {"timeout_s": self.timeout_s, "away_s": self.away_s}
        with alone():
            async with (
                _api().open(self.api_url, self.token, backoff, **times, draw=draw) as api,
                anyio.create_task_group() as tasks,
            ):
                await _Training(self, api, outbox, tasks, draw).run()
                await outbox.aclose()


class _Training:
    """What the server is asked, from registering to the last batch."""

    def __init__(
        self,
        rules: AtroposClient,
        api: Api,
        outbox: SendChannel[TrajectoryGroup],
        tasks: TaskGroup,
        draw: Callable[[], float],
    ) -> None:
        self._rules = rules
        self._api = api
        self._outbox = outbox
        self._tasks = tasks
        self._draw = draw
        self._step = rules.starting_step
        """Batches that came, those before this training included."""
        self._name = secrets.token_hex(4)
        """Of this training: what groups are called in it, no other calls them."""
        self._numbers = count()
        """Of batches that have no name of their own."""
        self._sent: dict[str, list[TrajectoryId]] = {}
        """What came in each batch that has one; empty when it has ended."""

    async def run(self) -> None:
        """Send what comes until it was all."""
        await self._api.greet()
        await self._register()
        while self._step < self._rules.num_steps:
            await self._send(await self._next())

    async def _register(self) -> None:
        rules = self._rules
        await self._api.register(
            TrainerRegistration(
                wandb_group=rules.wandb_group,
                wandb_project=rules.wandb_project,
                batch_size=rules.batch_size,
                max_token_len=rules.max_token_len,
                checkpoint_dir=rules.checkpoint_dir,
                save_checkpoint_interval=rules.save_checkpoint_interval,
                starting_step=self._step,
                num_steps=rules.num_steps,
            )
        )

    async def _next(self) -> BatchAnswer:
        """The next batch; asked for less and less often while there is none."""
        rules = self._rules
        began = empty_since = time.monotonic()
        pauses = Backoff(WITHOUT_END, rules.first_pause_s, rules.longest_pause_s).pauses(self._draw)
        while True:
            failures, asked_at = self._api.failures, time.monotonic()
            answer = await self._api.batch(rules.lease_s)
            if answer.status == "error":
                log.warning("trainer_unknown", url=shown(rules.api_url), told=answer.message, step=self._step)
                await self._register()
            elif answer.batch:
                current().metrics.mean("atropos/waited_s", time.monotonic() - began)
                return answer
            if answer.status == "error":
                empty_since = time.monotonic()
            elif self._api.failures > failures:  # a server that was away had nothing to be empty of
                empty_since += time.monotonic() - asked_at
            if rules.empty_s is not None and time.monotonic() - empty_since > rules.empty_s:
                raise self._api.empty(rules.empty_s)
            await anyio.sleep(next(pauses))

    async def _send(self, answer: BatchAnswer) -> None:
        """Send the groups of a batch, one after another: each is decoded while the one before is on its way.

        It is a step where there was one that was not sent before: in this run, or in one that it goes on with.
        """
        name = f"{self._name}.{next(self._numbers)}" if answer.batch_id is msgspec.UNSET else answer.batch_id
        again = name in self._sent
        sent = self._sent.get(name, [])
        new = 0 if again else await self._send_new(answer, name, sent)
        if not again and answer.batch_id is not msgspec.UNSET:
            self._sent[name] = sent
        if again or (sent and not new):
            log.warning("batch_came_again", batch=name)
            current().metrics.total("atropos/again")
        self._step += not again and (new > 0 or not sent)
        if answer.lease is not msgspec.UNSET:
            self._tasks.start_soon(self._acknowledge, answer.lease, sent, self._step == self._rules.num_steps)

    async def _send_new(self, answer: BatchAnswer, name: str, sent: list[TrajectoryId]) -> int:
        """Send those groups that are in no queue yet; `sent` is filled with all. Returns how many it were."""
        new = 0
        for number, piece in enumerate(answer.batch or ()):
            try:
                group = self._group(bytes(piece), f"{name}.{number}")
            except InvalidRecord as error:  # the others of the batch are as good as they would be without it
                log.warning("group_refused", url=shown(self._rules.api_url), reason=str(error))
                current().metrics.total("atropos/refused")
                continue
            sent += group.ids
            if mask_of(group.repetition_ids.tolist()) & ~current().ledger.known(group.id):
                new += 1
                await self._outbox.send(group)
            del group  # it is another stage's now
        return new

    def _group(self, piece: bytes, instance_id: str) -> TrajectoryGroup:
        (scored,) = decode_scored(piece)
        return to_group(
            scored,
            env="atropos" if scored.env_id is None else f"atropos.{scored.env_id}",
            instance_id=instance_id,
            policy_version=current().ledger.step,
            candidates=self._rules.candidates,
        )

    async def _acknowledge(self, lease: int | str, sent: list[TrajectoryId], last: bool) -> None:  # noqa: FBT001
        """When all of a batch has ended, the server need not keep it: also where that ended the run."""
        ledger = current().ledger
        try:
            for trajectory in sent:
                await ledger.ended(trajectory.group)
        finally:
            if not any(map(ledger.is_open, sent)):
                sent.clear()
                with anyio.move_on_after(LEAVING_S, shield=True):
                    await self._tell_ended(lease, last=last)

    async def _tell_ended(self, lease: int | str, *, last: bool) -> None:
        try:
            if last:  # who handed batches out counted one that came back once only: we know better
                await self._register()
            await self._api.acknowledge(lease)
        except AtroposAPIError as error:  # at worst the batch comes once more, as another one
            log.warning("not_acknowledged", lease=lease, reason=error.told)
            current().metrics.total("atropos/not_acknowledged")


def _api() -> type[Api]:
    try:
        from .api import Api  # noqa: PLC0415 (the extra is wanted by those who run a client)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"AtroposClient needs {error.name}, which is not installed: pip install 'penstock[http]'"
        ) from error
    return Api
