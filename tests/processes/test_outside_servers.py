"""Servers from outside: real processes, with families of their own, ended by real signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from tests.failsafe import FAILSAFE_S

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup, drop, processes, source
from penstock.errors import ServerFailed
from penstock.servers import OutsideServer, RunningServer, http_ready, tcp_ready
from penstock.testing import group

SCRIPT = Path(__file__).with_name("outside.py")


@pytest.fixture
def port() -> Iterator[int]:
    """Reserve a port while the test runs."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def command(port: int, *traits: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(SCRIPT), str(port), *traits]


def recipe(
    port: int, logs: Path, *traits: str, ready_timeout_s: float = 30, stop_timeout_s: float = 30
) -> OutsideServer:
    return OutsideServer(
        command=command(port, *traits),
        ready=http_ready(f"http://127.0.0.1:{port}/health"),
        name="server",
        logs=logs,
        ready_timeout_s=ready_timeout_s,
        stop_timeout_s=stop_timeout_s,
    )


async def settled(port: int) -> None:
    """Return when a server answers."""
    with anyio.fail_after(FAILSAFE_S):
        while True:
            with suppress(OSError):
                await ask(port, "/")
                return


async def ask(port: int, path: str) -> bytes:
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        return await stream.receive()


def pids_in(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+)", text)]


@contextmanager
def watched(pids: list[int]) -> Iterator[list[int]]:
    """Open descriptors of processes, which never refer to other processes."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextmanager
def child(arguments: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], bytes]]:
    """Start a process, and yield it with the first line that it prints."""
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as popen:
        assert popen.stdout
        try:
            yield popen, popen.stdout.readline()
        finally:
            popen.kill()


async def ended(descriptors: list[int]) -> None:
    with anyio.fail_after(FAILSAFE_S):
        for descriptor in descriptors:
            await anyio.wait_readable(descriptor)


def is_alive(descriptor: int) -> bool:
    try:
        signal.pidfd_send_signal(descriptor, 0)
    except ProcessLookupError:
        return False
    return True


@asynccontextmanager
async def running(server: OutsideServer) -> AsyncIterator[tuple[RunningServer, list[int]]]:
    """Run the server within the body, and yield descriptors of all its processes."""
    async with server.open() as opened:
        with watched(pids_in(opened.log.read_text())) as descriptors:
            yield opened, descriptors


# -- ready ---------------------------------------------------------------------------------------------------------


async def test_the_body_begins_when_the_probe_succeeds_and_not_before(port: int, tmp_path: Path) -> None:
    async with recipe(port, tmp_path, "late").open() as server:
        assert (await ask(port, "/")).startswith(b"HTTP/1.1 200")
        assert pids_in(server.log.read_text()) == [server.pid]


async def test_a_port_that_accepts_will_do_as_a_sign_of_life(port: int, tmp_path: Path) -> None:
    server = OutsideServer(command=command(port), ready=tcp_ready(port), logs=tmp_path)

    async with server.open() as opened:
        assert await ask(port, "/")

    assert opened.log == tmp_path / f"{Path(sys.executable).name}.log"


@pytest.mark.parametrize(
    ("trait", "timeout_s", "message"),
    [
        ("deaf", 0.1, r"server \(pid \d+\) was not ready within 0.1 s: .*[Rr]efused"),
        ("doomed", 60, r"(?s)server \(pid \d+\) exited with status 3\n.*no such model$"),
    ],
    ids=["not in time", "ended before"],
)
async def test_a_server_that_never_is_ready_fails_with_its_last_answer_or_its_end(
    port: int, tmp_path: Path, trait: str, timeout_s: float, message: str
) -> None:
    with pytest.raises(ServerFailed, match=message):
        async with recipe(port, tmp_path, trait, ready_timeout_s=timeout_s).open():
            pytest.fail("it never was ready")


async def test_a_program_that_does_not_exist_is_named(port: int, tmp_path: Path) -> None:
    server = OutsideServer(command=["/nowhere/vllm", "serve"], ready=tcp_ready(port), logs=tmp_path)

    with pytest.raises(ServerFailed, match=r"vllm \(pid 0\) could not be started: No such file or directory"):
        async with server.open():
            pytest.fail("it never was ready")


# -- ends ----------------------------------------------------------------------------------------------------------


async def test_a_server_is_asked_to_end_and_has_time_to(port: int, tmp_path: Path) -> None:
    async with running(recipe(port, tmp_path)) as (server, descriptors):
        assert is_alive(*descriptors)

    assert server.log.read_text().splitlines()[-1] == "ended"
    assert server.exit_reason == "exited with status 0"


async def test_the_whole_family_ends_even_if_none_of_them_wants_to(port: int, tmp_path: Path) -> None:
    async with recipe(port, tmp_path, "stubborn", "family", stop_timeout_s=0.05).open() as server:
        stack = ExitStack()
        family = stack.enter_context(watched(pids_in(server.log.read_text())))
        alive = [is_alive(each) for each in family]

    with stack:
        assert (alive, [is_alive(each) for each in family]) == ([True] * 4, [False] * 4)
    assert server.exit_reason == "was killed by SIGKILL"


async def test_another_server_at_its_port_is_detected_and_left_running(port: int, tmp_path: Path) -> None:
    with child(command(port)) as (stranger, _):
        await settled(port)
        with pytest.raises(ServerFailed, match="expected the probe to fail before server is started, it succeeded for"):
            async with recipe(port, tmp_path, stop_timeout_s=0.05).open():
                pytest.fail("expected another server")

        assert stranger.poll() is None
        assert not (tmp_path / "server.log").exists()


async def test_one_from_before_that_is_about_to_end_is_waited_for(port: int, tmp_path: Path) -> None:
    with child(command(port)) as (before, _):
        await settled(port)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, port, "/die")
            async with recipe(port, tmp_path).open() as server:
                assert await anyio.to_thread.run_sync(before.wait) == 4
                assert pids_in(server.log.read_text()) == [server.pid]


async def test_other_processes_of_the_same_program_are_left_running(port: int, tmp_path: Path) -> None:
    with child(command(port, "deaf")) as (stranger, _):
        async with recipe(port, tmp_path, "stubborn", stop_timeout_s=0.05).open():
            pass
        assert stranger.poll() is None


async def test_a_server_that_dies_ends_the_body_and_shows_its_log(port: int, tmp_path: Path) -> None:
    async def use() -> None:
        async with recipe(port, tmp_path).open():
            await ask(port, "/die")
            await anyio.sleep_forever()

    with pytest.raises(ServerFailed, match=r"(?s)exited with status 4\n.*as you wish$"):
        await use()


async def test_an_exception_of_the_body_after_the_servers_death_is_raised_as_that_death(
    port: int, tmp_path: Path
) -> None:
    async def use() -> None:
        async with recipe(port, tmp_path).open() as server:
            with anyio.CancelScope(shield=True):
                await ask(port, "/die")
                await server.ended.wait()
                raise ConnectionError("nobody answers")

    with pytest.raises(ServerFailed, match="exited with status 4") as failed:
        await use()

    assert isinstance(failed.value.__cause__, ConnectionError)


async def test_an_unrelated_exception_of_the_body_is_raised_unchanged(port: int, tmp_path: Path) -> None:
    ended: list[RunningServer] = []

    async def use() -> None:
        async with recipe(port, tmp_path).open() as server:
            ended.append(server)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await use()

    assert ended[0].exit_reason == "exited with status 0"


async def test_a_cancelled_body_ends_the_server_too(port: int, tmp_path: Path) -> None:
    ended: list[RunningServer] = []

    with anyio.CancelScope() as scope:
        async with recipe(port, tmp_path).open() as server:
            ended.append(server)
            scope.cancel()
            await anyio.sleep_forever()

    assert ended[0].exit_reason == "exited with status 0"


# -- deaths --------------------------------------------------------------------------------------------------------

USER = """
import sys, anyio
from penstock.servers import OutsideServer, tcp_ready

async def main(port, logs):
    server = OutsideServer(command=sys.argv[3:], ready=tcp_ready(port), name="server", logs=logs, stop_timeout_s=0.05)
    async with server.open():
        print("ready", flush=True)
        await anyio.sleep_forever()

anyio.run(main, int(sys.argv[1]), sys.argv[2])
"""


async def test_killing_the_process_that_started_it_ends_the_process_tree(port: int, tmp_path: Path) -> None:
    arguments = [str(port), str(tmp_path), *command(port, "stubborn", "family")]
    with child([sys.executable, "-c", USER, *arguments]) as (user, output):
        assert output == b"ready\n"
        with watched(pids_in((tmp_path / "server.log").read_text())) as family:
            user.kill()
            await ended(family)
            assert len(family) == 4


async def test_a_failure_ends_with_the_first_printed_error_and_not_with_its_consequences(
    port: int, tmp_path: Path
) -> None:
    earlier = "Traceback (most recent call last):\nKeyError: of a server that ran before\n"
    (tmp_path / "server.log").write_text(earlier)

    with pytest.raises(ServerFailed, match=r"exited with status 1\n") as failed:
        async with recipe(port, tmp_path, "broken").open():
            pytest.fail("it never listens")

    assert "See root cause above." in str(failed.value)
    assert str(failed.value).endswith("\n\nThe first error in it:\n\nSafetensorError: incomplete metadata")
    assert "KeyError" not in str(failed.value)


async def test_a_server_whose_keeper_is_killed_dies_with_it(port: int, tmp_path: Path) -> None:
    async def use() -> None:
        async with running(recipe(port, tmp_path)) as (server, descriptors):
            os.kill(server._process.popen.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):
                await ended(descriptors)
            await anyio.sleep_forever()

    with pytest.raises(ServerFailed, match="lost its subreaper"):
        await use()


async def test_a_keeper_that_is_asked_to_end_ends_its_server_first(port: int, tmp_path: Path) -> None:
    async def use() -> None:
        async with recipe(port, tmp_path).open() as server:
            os.kill(server._process.popen.pid, signal.SIGTERM)
            await anyio.sleep_forever()

    with pytest.raises(ServerFailed, match=r"(?s)exited with status 0\n.*ended$"):
        await use()


async def test_processes_that_a_dead_server_has_left_are_ended(port: int, tmp_path: Path) -> None:
    async def use() -> None:
        async with recipe(port, tmp_path, "family").open() as server:
            family.extend(stack.enter_context(watched(pids_in(server.log.read_text()))))
            with anyio.CancelScope(shield=True):
                await ask(port, "/die")
                await ended(family)
            await anyio.sleep_forever()

    family: list[int] = []
    with ExitStack() as stack:
        with pytest.raises(ServerFailed, match="exited with status 4"):
            await use()
        assert [is_alive(each) for each in family] == [False] * 4


@dataclass(frozen=True)
class AskingSource:
    """Has a server of its own, and sends a group for what that answers."""

    server: OutsideServer
    port: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        async with self.server.open():
            answer = await ask(self.port, "/")
            await outbox.send(group(instance_id=answer.split()[1].decode()))


@dataclass
class Noting:
    """Records the names of received groups."""

    names: list[str] = field(default_factory=list)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for each in inbox:
            self.names.append(each.instance_id)
            drop(each, "filtered", "only noted")


async def test_a_server_is_part_of_a_stage_wherever_that_runs(port: int, tmp_path: Path) -> None:
    sink = Noting()

    await source(AskingSource(recipe(port, tmp_path), port), on=processes(1)).sink(sink).run()

    assert sink.names == ["200"]
    assert (tmp_path / "server.log").read_text().endswith("ended\n")
