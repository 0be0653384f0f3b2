"""The default key of tcp channels on loopback: one for each user, created on first use, readable by its owner alone."""

import os
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import zmq
from tests.failsafe import FAILSAFE_S
from tests.processes.children import child, line

from penstock import TrajectoryGroup
from penstock.channels import ChannelKey, connect, serve
from penstock.errors import InvalidKey, KeyUnavailable, PeerClosed
from penstock.testing import group

SENDER = """
    import sys, anyio
    from penstock import TrajectoryGroup
    from penstock.channels import connect
    from penstock.testing import group

    async def main(url):
        async with connect(url, TrajectoryGroup) as outbox:
            await outbox.send(group(instance_id="from afar"))
        print("sent", flush=True)

    anyio.run(main, sys.argv[1])
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path at which the first channel creates the key."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "penstock" / "channel.key"


def modes(path: Path) -> tuple[int, int]:
    """Return the modes of a file and of its folder."""
    return path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777


async def test_processes_of_one_user_use_the_same_key_which_other_users_may_not_read(path: Path) -> None:
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
        with child(SENDER, inbox.url) as sender:
            assert (await inbox.receive()).instance_id == "from afar"
            assert await line(sender) == "sent"

    assert modes(path) == (0o600, 0o700)


async def test_a_sender_with_the_default_key_of_another_user_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        with anyio.fail_after(FAILSAFE_S), pytest.raises(PeerClosed, match="has it the same key"):
            async with connect(inbox.url, TrajectoryGroup):
                pass


async def test_a_message_without_a_key_is_never_received() -> None:
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
        stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        stranger.setsockopt(zmq.RECONNECT_IVL, 3_600_000)  # connects once; with −1 a send after the end would block
        with stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(inbox.peers.router._socket.getsockopt_string(zmq.LAST_ENDPOINT))
            stranger.send(b"hello")
            async with connect(inbox.url, TrajectoryGroup) as outbox:
                await outbox.send(group())
                await inbox.receive()
        assert inbox.statistics().received == 1
        assert inbox.rejected <= 1  # its connection; its message was not read


async def send_with_default_key() -> None:
    """Serve and connect without a key."""
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup):
        pass


async def test_receivers_that_create_the_key_at_the_same_time_all_use_the_first_one(path: Path) -> None:
    together, created, received = threading.Barrier(8), threading.Barrier(8), list[str]()

    async def serve_and_receive() -> None:
        await anyio.to_thread.run_sync(together.wait, FAILSAFE_S)
        async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
            await anyio.to_thread.run_sync(created.wait, FAILSAFE_S)
            key = await anyio.to_thread.run_sync(ChannelKey.load, path)
            async with connect(inbox.url, TrajectoryGroup, key=key) as outbox:
                await outbox.send(group())
                received.append((await inbox.receive()).instance_id)

    threads = [threading.Thread(target=anyio.run, args=[serve_and_receive]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join, FAILSAFE_S)

    assert len(received) == 8
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_key_that_other_users_may_read_is_refused_with_its_path(path: Path) -> None:
    anyio.run(send_with_default_key)
    path.chmod(0o644)

    with pytest.raises(InvalidKey, match=rf"expected {path} to be readable by its owner alone, got mode 644"):
        anyio.run(send_with_default_key)


def test_a_key_that_belongs_to_another_user_is_refused_with_its_path(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anyio.run(send_with_default_key)
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)

    with pytest.raises(InvalidKey, match=rf"expected {path} to belong to this user"):
        anyio.run(send_with_default_key)


async def test_a_key_that_cannot_be_created_is_an_error_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))

    for opened in (serve("tcp://127.0.0.1:0", TrajectoryGroup), connect("tcp://127.0.0.1:1", TrajectoryGroup)):
        with pytest.raises(KeyUnavailable, match=rf"at {tmp_path}/file/penstock/channel.key, got .*Key.create\(path\)"):
            async with opened:
                pass


def test_without_a_configured_folder_the_key_is_in_the_home_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))

    anyio.run(send_with_default_key)

    assert (tmp_path / ".config/penstock/channel.key").exists()
