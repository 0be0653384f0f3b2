"""Beyond this host a peer without the key is rejected, and can read nothing."""

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import zmq
from tests.failsafe import FAILSAFE_S
from tests.moments import moment

from penstock import TrajectoryGroup
from penstock.channels import ChannelKey, RemoteReceiver, connect, serve
from penstock.errors import InvalidKey, PeerClosed, ProtocolMismatch
from penstock.testing import group

KEY, OTHER = ChannelKey(bytes(32)), ChannelKey(bytes(range(32)))


@asynccontextmanager
async def serving(url: str = "tcp://127.0.0.1:0", key: ChannelKey | None = KEY) -> AsyncIterator[RemoteReceiver[Any]]:
    async with serve(url, TrajectoryGroup, key=key) as inbox:
        yield inbox


async def still_works(inbox: RemoteReceiver[Any], key: ChannelKey | None = KEY) -> None:
    async with connect(inbox.url, TrajectoryGroup, key=key) as outbox:
        await outbox.send(group(instance_id="after"))
        assert (await inbox.receive()).instance_id == "after"


async def test_a_receiver_with_a_key_may_listen_on_all_addresses() -> None:
    async with serving("tcp://0.0.0.0:0") as inbox:
        port = inbox.url.rpartition(":")[2]
        async with connect(f"tcp://localhost:{port}", TrajectoryGroup, key=KEY) as outbox:
            await outbox.send(group())
            assert len(await inbox.receive()) == 2


async def test_without_a_key_nothing_leaves_loopback() -> None:
    for url in ("tcp://0.0.0.0:0", "tcp://192.0.2.1:5555"):
        with pytest.raises(ValueError, match=r"or a key, got .* and none: .* Key.create\(path\)"):
            async with serving(url, None):
                pass
        with pytest.raises(ValueError, match="or tunnel the port with ssh -L"):
            async with connect(url.replace(":0", ":1"), TrajectoryGroup):
                pass


@pytest.mark.parametrize(
    ("theirs", "ours"), [(KEY, OTHER), (KEY, None), (None, KEY)], ids=["another", "none", "one too many"]
)
async def test_a_sender_with_another_key_is_refused_at_once_and_the_others_go_on(
    theirs: ChannelKey | None, ours: ChannelKey | None
) -> None:
    async with serving(key=theirs) as inbox:
        with anyio.fail_after(FAILSAFE_S), pytest.raises((PeerClosed, ProtocolMismatch)):
            async with connect(inbox.url, TrajectoryGroup, key=ours):
                pass
        await still_works(inbox, theirs)
        assert inbox.rejected == 1


async def test_messages_without_the_key_are_ignored_and_counted() -> None:
    async with serving() as inbox:
        endpoint = inbox.peers.router._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        strangers: list[zmq.Socket[bytes]] = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(2)]
        OTHER.protect(strangers[1], "sender")
        for stranger in strangers:
            stranger.connect(endpoint)
            stranger.send(b"hello")
        await still_works(inbox)
        with anyio.fail_after(FAILSAFE_S):
            while inbox.rejected < len(strangers):
                await moment()
        assert inbox.statistics().received == 1
        for stranger in strangers:
            stranger.close(linger=0)


async def test_messages_cannot_be_read_nor_replayed_by_others() -> None:
    secret = group(tokens=np.full(14, 0x41424344), env="a name that is to be secret")
    async with serving() as inbox:
        port = int(inbox.url.rpartition(":")[2])
        with overhearing("127.0.0.2", port) as overheard:  # no other port is passed on
            async with connect(f"tcp://127.0.0.2:{port}", TrajectoryGroup, key=KEY) as outbox:
                await outbox.send(secret)
                assert (await inbox.receive()).env == secret.env
        sent = b"".join(overheard)

        assert len(sent) > 300
        assert secret.tokens.tobytes() not in sent
        assert secret.env.encode() not in sent
        with socket.create_connection(("127.0.0.1", port)) as again:
            again.sendall(sent)
            while not inbox.rejected:
                await moment()
        await still_works(inbox)


@contextmanager
def overhearing(host: str, port: int) -> Iterator[list[bytes]]:
    """Forward `port` on another loopback address, and record the bytes that a sender sends."""
    sent: list[bytes] = []
    open_sockets: list[socket.socket] = []

    def pass_on(one: socket.socket, other: socket.socket, copied: list[bytes]) -> None:
        with suppress(OSError):
            while part := one.recv(65_536):
                copied.append(part)
                other.sendall(part)
            other.shutdown(socket.SHUT_WR)

    def relay(listener: socket.socket) -> None:
        with suppress(OSError):
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", port))
            open_sockets.extend((near, far))
            threading.Thread(target=pass_on, args=(far, near, []), daemon=True).start()
            pass_on(near, far, sent)

    listener = socket.create_server((host, port))
    open_sockets.append(listener)
    threading.Thread(target=relay, args=(listener,), daemon=True).start()
    try:
        yield sent
    finally:
        for one in open_sockets:
            one.close()


def test_a_key_is_kept_where_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    made = ChannelKey.create(path)

    assert path.stat().st_mode & 0o777 == 0o600
    assert ChannelKey.load(path)._secret == made._secret
    assert made._secret.hex() not in repr(made)
    with pytest.raises(FileExistsError):
        ChannelKey.create(path)
    path.chmod(0o640)
    with pytest.raises(InvalidKey, match="readable by its owner alone, got mode 640: chmod 600"):
        ChannelKey.load(path)


@pytest.mark.parametrize("text", ["", "00" * 31, "zz" * 32, "00" * 33])
def test_an_invalid_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.key"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(InvalidKey, match="expected"):
        ChannelKey.load(path)


async def test_shm_has_no_use_for_a_key() -> None:
    with pytest.raises(ValueError, match="key: expected none for shm"):
        serve("shm://", TrajectoryGroup, key=KEY)
