"""`penstock launch`: a gateway, model servers, a trainer and environments, started in this order and ended in reverse.

Each is an `OutsideServer`: ready when its probe succeeds, ended with all its processes, also when the launcher is
killed. The trainer is ready when it has registered with the gateway, an environment when the gateway has admitted one
more. The launch ends with the trainer; any other program that ends first ends the launch, except an environment that
has registered and exits with status 0: it has sent all its groups.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from urllib.request import ProxyHandler, Request, build_opener

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from ...._pipeline.errors import ServerFailed
from ...._pipeline.servers.outside_server import PROBE_S, OutsideServer, Probe, RunningServer, http_ready
from ...._pipeline.util.exception_groups import unwrap_first
from ...._pipeline.util.signals import handled_stop_signals
from .launch_config import LaunchConfig, arguments

Tell: TypeAlias = Callable[[str], None]
"""Takes a line for the user."""

TRAINER = "trainer"

DIRECT = build_opener(ProxyHandler({}))
"""Asks the gateway without a proxy, also if the variables of the environment name one."""


async def launch(config: LaunchConfig, tell: Tell) -> int:
    """Run the programs until the trainer has ended, or a stop signal arrives; return the exit status.

    It is that of the trainer, 128 + n where signal n ended it or where the stop signal n came before it was started.

    Raises:
        ServerFailed: another program could not be started, was not ready in time, or ended; with the end of its log.
    """
    launched = _Launch(config, tell)
    with anyio.open_signal_receiver(*handled_stop_signals()) as signals, unwrap_first():
        async with anyio.create_task_group() as tasks:

            async def stop() -> None:
                async for number in signals:
                    launched.interrupted(number)
                    tasks.cancel_scope.cancel()

            tasks.start_soon(stop)
            await launched.run()
            tasks.cancel_scope.cancel()
    return launched.exit_status


@dataclass(slots=True)
class _Launch:
    """The programs of one launch."""

    config: LaunchConfig
    tell: Tell
    _trainer: RunningServer | None = None
    """Set when it is ready."""
    _exit_code: int | None = None
    """That of the trainer where it ended by itself."""
    _interrupted_by: int = 0
    """The first stop signal."""

    @property
    def exit_status(self) -> int:
        """Return that of the trainer, as a shell has it."""
        code = self._exit_code
        if code is None and self._trainer is not None:
            code = self._trainer.exit_code
        if code is None:
            code = -self._interrupted_by
        return code if code >= 0 else 128 - code

    def interrupted(self, number: signal.Signals) -> None:
        """Note a stop signal."""
        self._interrupted_by = self._interrupted_by or number
        self.tell(f"{number.name}: the environments end, then the trainer, the servers and the gateway")

    async def run(self) -> None:
        """Run all of them, until the trainer ends."""
        config = self.config
        gateway = self._program("gateway", config.gateway_command, http_ready(f"{config.gateway}/"))
        async with self._opened(gateway):
            try:
                async with self._servers_opened():
                    await self._run_trainer()
            finally:
                await self._tell_counts()

    @asynccontextmanager
    async def _servers_opened(self) -> AsyncGenerator[None]:
        """Start all model servers at once, and end them at once after the body."""
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as starting:
                for name, server in self.config.servers.items():
                    command = arguments(server.command, f"servers.{name}.command")
                    program = self._program(name, command, http_ready(server.ready))
                    starting.start_soon(tasks.start, self._keep_open, program)
            yield
            tasks.cancel_scope.cancel()

    async def _keep_open(self, program: OutsideServer, *, task_status: TaskStatus[None]) -> None:
        async with self._opened(program):
            task_status.started()
            await anyio.sleep_forever()

    async def _run_trainer(self) -> None:
        """Run the trainer, and the environments from its registration on."""
        trainer = self._program(TRAINER, arguments(self.config.trainer, TRAINER), self._trainer_registered)
        try:
            async with self._opened(trainer) as self._trainer, anyio.create_task_group() as environments:
                for number, (name, command) in enumerate(self.config.environments.items(), 1):
                    admitted = partial(self._environments_admitted, number)
                    program = self._program(name, arguments(command, f"environments.{name}"), admitted)
                    await environments.start(self._run_environment, program)
                await anyio.sleep_forever()
        except ServerFailed as error:
            if error.server != TRAINER or error.exit_code is None:
                raise
            self._exit_code = error.exit_code
            self.tell(str(error).partition("\n")[0])

    async def _run_environment(self, program: OutsideServer, *, task_status: TaskStatus[None]) -> None:
        """Run an environment; raise unless it was admitted and then ended with status 0."""
        ready = False
        try:
            async with self._opened(program):
                ready = True
                task_status.started()
                await anyio.sleep_forever()
        except ServerFailed as error:
            if error.exit_code != 0 or not (ready or await _succeeds(program.ready)):
                raise
            self.tell(str(error).partition("\n")[0])
        if not ready:
            task_status.started()

    def _program(self, name: str, command: Sequence[str], ready: Probe) -> OutsideServer:
        return OutsideServer(
            command=command,
            ready=ready,
            name=name,
            logs=None if name == TRAINER else self.config.logs,
            environment={"ATROPOS_API_URL": self.config.gateway, "PYTHONUNBUFFERED": "1"},
            ready_timeout_s=self.config.ready_timeout_s,
            stop_timeout_s=self.config.stop_timeout_s,
        )

    @asynccontextmanager
    async def _opened(self, program: OutsideServer) -> AsyncGenerator[RunningServer]:
        async with program.open() as running:
            output = "" if program.logs is None else f", output in {running.log}"
            self.tell(f"{running.name} is ready: pid {running.pid}{output}")
            yield running

    # -- state of the gateway -----------------------------------------------------------------------------------------

    async def _trainer_registered(self) -> None:
        if (await self._ask("/info"))["batch_size"] < 0:
            raise LookupError(f"no trainer has registered at {self.config.gateway}")

    async def _environments_admitted(self, number: int) -> None:
        found = len((await self._ask("/status"))["environments"])
        if found < number:
            raise LookupError(f"{found} of {number} environments have registered at {self.config.gateway}")

    async def _tell_counts(self) -> None:
        """Tell the outcome of each environment's sequences, if the gateway still answers."""
        with anyio.move_on_after(PROBE_S, shield=True), suppress(OSError, ValueError):
            for counts in (await self._ask("/status"))["environments"]:
                waiting = counts["queued"] + counts["buffered"]
                self.tell(
                    f"{counts['name']}: {counts['submitted']} sequences accepted = {counts['taken']} given to the "
                    f"trainer + {waiting} waiting"
                )

    async def _ask(self, path: str) -> Any:
        return await anyio.to_thread.run_sync(_answer, self.config.gateway + path, abandon_on_cancel=True)


async def _succeeds(probe: Probe) -> bool:
    with suppress(OSError, LookupError):
        await probe()
        return True
    return False


def _answer(url: str) -> Any:
    """Return the JSON that the gateway answers with. Blocks."""
    token = os.environ.get("PENSTOCK_TOKEN")
    request = Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310 (http alone)
    with DIRECT.open(request, timeout=PROBE_S) as answer:
        return json.load(answer)
