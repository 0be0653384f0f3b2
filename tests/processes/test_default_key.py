"""On loopback too a key is used, unless another is given: this user's, made on first use and read by nobody else."""

import os
import threading
from pathlib import Path

import anyio
import pytest
import zmq
from tests.failsafe import FAILSAFE_S
from tests.processes.children import child, line

from penstock import TrajectoryGroup
from penstock._pipeline.channels.default_key import default_key, default_key_path
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
    """Where the key of a user lies who has none yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "penstock" / "channel.key"


def modes(path: Path) -> tuple[int, int]:
    """The modes of a file and of its folder."""
    return path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777


async def test_two_processes_of_one_user_find_the_same_key_and_others_may_not_read_it(path: Path) -> None:
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
        with child(SENDER, inbox.url) as sender:
            assert (await inbox.receive()).instance_id == "from afar"
            assert await line(sender) == "sent"

    assert modes(path) == (0o600, 0o700)


async def test_another_user_of_the_host_is_refused_though_it_gave_no_key_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        with anyio.fail_after(FAILSAFE_S), pytest.raises(PeerClosed, match="has it the same key"):
            async with connect(inbox.url, TrajectoryGroup):
                pass


async def test_what_a_stranger_sends_without_a_key_is_never_received() -> None:
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
        stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        stranger.setsockopt(zmq.RECONNECT_IVL, -1)  # it comes once
        with stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(inbox._socket.getsockopt_string(zmq.LAST_ENDPOINT))
            stranger.send(b"hello")
            async with connect(inbox.url, TrajectoryGroup) as outbox:
                await outbox.send(group())
                await inbox.receive()
        assert inbox.statistics().received == 1
        assert inbox.rejected <= 1  # its connection; no message of its was heard


def test_threads_that_make_the_key_at_the_same_time_all_use_the_one_that_was_first(path: Path) -> None:
    together, made = threading.Barrier(8), list[bytes]()

    def make() -> None:
        together.wait(FAILSAFE_S)
        made.append(default_key()._secret)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert made == [ChannelKey.load(path)._secret] * 8
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_key_that_others_may_read_is_refused_with_its_path(path: Path) -> None:
    default_key()
    path.chmod(0o644)

    with pytest.raises(InvalidKey, match=rf"expected {path} to be readable by its owner alone, got mode 644"):
        default_key()


def test_a_key_that_belongs_to_another_user_is_refused_with_its_path(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default_key()
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)

    with pytest.raises(InvalidKey, match=rf"expected {path} to belong to this user"):
        default_key()


async def test_where_no_key_can_be_made_the_error_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))

    for opened in (serve("tcp://127.0.0.1:0", TrajectoryGroup), connect("tcp://127.0.0.1:1", TrajectoryGroup)):
        with pytest.raises(KeyUnavailable, match=rf"at {tmp_path}/file/penstock/channel.key, got .*Key.create\(path\)"):
            async with opened:
                pass


def test_without_a_configured_folder_it_lies_below_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert default_key_path() == Path("/somewhere/.config/penstock/channel.key")
