"""Over tcp one port carries everything, and a failed connection is an error with its reason."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits
from tests.processes.children import child, line

from penstock import TrajectoryGroup
from penstock.channels import connect, serve
from penstock.errors import NobodyListens, PeerClosed, PeerLost
from penstock.testing import group

HELD_UP = """
    import ctypes, anyio
    from penstock import TrajectoryGroup
    from penstock.channels import serve

    async def main():
        async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
            print(inbox.url, flush=True)
            ctypes.PyDLL(None).sleep(60)  # holds the interpreter lock

    anyio.run(main)
"""

SENDER = """
    import sys, anyio
    from penstock import TrajectoryGroup
    from penstock.channels import connect
    from penstock.testing import group

    async def main(url):
        async with connect(url, TrajectoryGroup, name="short-lived") as outbox:
            for number in range(3):
                await outbox.send(group(instance_id=str(number)))
            await anyio.sleep(0)
            print("sent", flush=True)
            await anyio.sleep_forever()

    anyio.run(main, sys.argv[1])
"""


def ports_of_this_process() -> set[int]:
    """Return the TCP ports at which this process listens."""
    own = {os.fstat(int(fd.name)).st_ino for fd in Path("/proc/self/fd").iterdir() if "socket:" in str(_target(fd))}
    lines = [each.split() for each in Path("/proc/self/net/tcp").read_text("ascii").splitlines()[1:]]
    return {int(each[1].partition(":")[2], 16) for each in lines if each[3] == "0A" and int(each[9]) in own}


def _target(link: Path) -> Path:
    with suppress(FileNotFoundError):
        return link.readlink()
    return link


@contextmanager
def mute(backlog: int = 8) -> Iterator[int]:
    """Listen at a port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as listener:
        yield int(listener.getsockname()[1])


@contextmanager
def another_service() -> Iterator[int]:
    """Listen at a port at which another service answers, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield int(listener.getsockname()[1])
        thread.join(FAILSAFE_S)


def resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Have every host name resolve to these addresses, in this order."""
    own = socket.getaddrinfo

    def resolve(_host: str, port: int, **named: Any) -> list[Any]:
        return [each for address in addresses for each in own(address, port, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


async def arrives(url: str, inbox: Any) -> None:
    async with connect(url, TrajectoryGroup) as outbox:
        await outbox.send(group(instance_id="there"))
        assert (await inbox.receive()).instance_id == "there"


async def receive_into(received: list[str], inbox: Any) -> None:
    """Receive until that fails."""
    while True:
        received.append((await inbox.receive()).instance_id)


async def test_a_receiver_listens_at_the_port_of_its_url_alone() -> None:
    before = ports_of_this_process()  # torch.distributed listens until the process ends
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
        await outbox.send(group())
        await inbox.receive()
        assert ports_of_this_process() - before == {int(inbox.url.rpartition(":")[2])}


async def test_a_host_that_has_several_addresses_is_reached_at_the_one_where_the_receiver_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serve("tcp://127.0.0.3:0", TrajectoryGroup) as inbox:
        port = inbox.url.rpartition(":")[2]
        resolves_to(monkeypatch, "127.0.0.2", "127.0.0.3")
        await arrives(f"tcp://trainer.test:{port}", inbox)


async def test_a_receiver_listens_at_one_port_of_all_addresses_that_its_host_has_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolves_to(monkeypatch, "127.0.0.2", "127.0.0.3")
    async with serve("tcp://trainer.test:0", TrajectoryGroup) as inbox:
        port = inbox.url.rpartition(":")[2]
        monkeypatch.undo()
        for address in ("127.0.0.2", "127.0.0.3"):
            await arrives(f"tcp://{address}:{port}", inbox)


async def test_ipv6_is_an_address_like_any_other() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"expected this machine to have ::1, got {error}")
    async with serve("tcp://[::1]:0", TrajectoryGroup) as inbox:
        await arrives(inbox.url, inbox)


async def test_a_taken_port_is_an_error() -> None:
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
        with pytest.raises(OSError, match=r"expected to listen at 127\.0\.0\.1 port \d+, got Address already in use"):
            async with serve(inbox.url, TrajectoryGroup):
                pass


async def test_without_a_listener_the_reason_is_a_refused_connection() -> None:
    with mute() as port:
        pass
    with pytest.raises(NobodyListens, match=rf"at tcp://127.0.0.1:{port}, got .*[Cc]onnect.*: is its process running"):
        async with connect(f"tcp://127.0.0.1:{port}", TrajectoryGroup):
            pass


async def test_a_port_that_accepts_and_sends_nothing_times_out_in_the_handshake() -> None:
    with (
        mute() as port,
        pytest.raises(NobodyListens, match=r"got no answer for 0\.2 s: .* a program other than penstock"),
    ):
        async with connect(f"tcp://127.0.0.1:{port}", TrajectoryGroup, heartbeat_timeout_s=0.2):
            pass


async def test_another_service_that_answers_and_closes_ended_the_connection() -> None:
    with another_service() as port, pytest.raises(PeerClosed, match="ended the connection in the handshake"):
        async with connect(f"tcp://127.0.0.1:{port}", TrajectoryGroup):
            pass


async def test_a_receiver_whose_event_loop_is_blocked_is_distinguished_from_a_stopped_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limits(monkeypatch, ANSWER_TIMEOUT_S=1)
    with child(HELD_UP) as receiver, pytest.raises(NobodyListens, match=r"answers, so its event loop is blocked"):
        async with connect(await line(receiver), TrajectoryGroup, heartbeat_timeout_s=1):
            pass


async def test_when_connecting_returns_the_receiver_knows_the_sender() -> None:
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup):
        assert inbox.statistics().senders == 1


async def test_the_records_of_a_killed_sender_are_received_before_its_loss_is_raised() -> None:
    for _ in range(2):
        async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
            with child(SENDER, inbox.url) as sender:
                assert await line(sender) == "sent"
                received = [(await inbox.receive()).instance_id]
                sender.kill()
                with (
                    anyio.fail_after(FAILSAFE_S),
                    pytest.raises(PeerLost, match=r"short-lived .* ended its connection"),
                ):
                    await receive_into(received, inbox)
                assert received == [str(number) for number in range(len(received))]
