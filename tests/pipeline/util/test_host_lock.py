from __future__ import annotations

import os
import signal
import tempfile
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from tests.failsafe import FAILSAFE_S
from tests.namespaces import printed_by, read_only
from tests.processes.children import child, line

from penstock import host_lock
from penstock.errors import LockTimedOut, UnsafeLock

HOLDER = """
    import sys
    from pathlib import Path
    from penstock import host_lock

    with host_lock("files of a test"):
        print("held", flush=True)
        sys.stdin.read()
        Path(sys.argv[1]).touch()
"""


def test_one_process_of_a_host_holds_a_lock_at_a_time(tmp_path: Path) -> None:
    made, seen = tmp_path / "made", []

    def take() -> None:
        with host_lock("files of a test"):
            seen.append(made.exists())

    with child(HOLDER, str(made)) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waiting = threading.Thread(target=take)
        waiting.start()
        holder.stdin.close()
        waiting.join(FAILSAFE_S)

    assert seen == [True]


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with child(HOLDER, str(tmp_path / "made")) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()

        with host_lock("files of a test"):
            assert not list(tmp_path.iterdir())


async def test_a_task_waits_for_another_process_while_the_event_loop_goes_on(tmp_path: Path) -> None:
    made, seen = tmp_path / "made", []
    began = anyio.Event()

    async def take() -> None:
        began.set()
        async with host_lock("files of a test"):
            seen.append(await anyio.Path(made).exists())

    with child(HOLDER, str(made)) as holder:
        assert await line(holder) == "held"
        with anyio.fail_after(FAILSAFE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(take)
                await began.wait()
                assert holder.stdin is not None
                holder.stdin.close()

    assert seen == [True]


async def test_a_wait_that_is_cancelled_leaves_the_lock_free() -> None:
    async with host_lock("files of a test"), anyio.create_task_group() as tasks:
        tasks.start_soon(AsyncExitStack().enter_async_context, host_lock("files of a test"))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    async with host_lock("files of a test"):
        pass


async def test_tasks_and_threads_that_share_the_object_hold_it_one_at_a_time() -> None:
    lock, held, most = host_lock("files of a test"), list[None](), []

    def block() -> None:
        with lock:
            held.append(None)
            most.append(len(held))
            held.pop()

    async def wait() -> None:
        async with lock:
            held.append(None)
            await anyio.lowlevel.checkpoint()
            most.append(len(held))
            held.pop()

    with anyio.fail_after(FAILSAFE_S):
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(wait)
                tasks.start_soon(anyio.to_thread.run_sync, block)

    assert most == [1] * 8


FORKS = """
    import os, sys
    from penstock import host_lock

    with host_lock("files of a test"):
        if not os.fork():
            sys.stdin.read()
            os._exit(0)
    with host_lock("files of a test"):
        print("free", flush=True)
"""


async def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock() -> None:
    with child(FORKS) as forking, anyio.fail_after(FAILSAFE_S):
        assert await line(forking) == "free"


IN_A_READ_ONLY_FOLDER = """
import sys, tempfile
from penstock import host_lock
from penstock.errors import NotWritable

tempfile.tempdir = sys.argv[1]
try:
    host_lock("GSM8K").__enter__()
except NotWritable as error:
    print(f"lock: {error}")
"""


def test_a_temporary_folder_that_is_read_only_is_an_error_with_its_path_and_the_remedy(tmp_path: Path) -> None:
    printed = printed_by(read_only(tmp_path), "-c", IN_A_READ_ONLY_FOLDER, str(tmp_path))

    assert printed == {
        "lock": f"expected to write the lock for GSM8K in {tmp_path}, got no permission (Read-only file system): let "
        "this user write there, or set TMPDIR to another folder"
    }


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for temporary files of this process and its children."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def lock_file(temporary: Path) -> Path:
    """Return the path of the lock's file, which exists afterwards."""
    with host_lock("files of a test"):
        (found,) = temporary.glob("penstock-locks-*/*")
    return found


@pytest.mark.usefixtures("temporary")
def test_a_lock_that_another_process_holds_for_too_long_is_an_error_that_names_the_process(tmp_path: Path) -> None:
    with child(HOLDER, str(tmp_path / "made")) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)

        with pytest.raises(LockTimedOut) as raised, host_lock("files of a test", timeout_s=0.01):
            pass
        holder.send_signal(signal.SIGCONT)

    assert f"expected the lock for files of a test within 0.01 s, but the stopped process {holder.pid} (" in str(
        raised.value
    )


@pytest.mark.usefixtures("temporary")
async def test_a_long_wait_is_logged_with_the_process_that_holds_the_lock(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock._pipeline.util.host_lock.WARN_S", 0.0)

    async with host_lock("files of a test"):
        with pytest.raises(LockTimedOut):
            async with host_lock("files of a test", timeout_s=0.01):
                pass

    assert caplog.text.count("lock_awaited") == 1
    assert f"holder='process {os.getpid()} (" in caplog.text


def test_the_folder_of_locks_is_this_users_alone(temporary: Path) -> None:
    assert lock_file(temporary).parent.stat().st_mode & 0o777 == 0o700
    assert lock_file(temporary).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o750])
def test_a_folder_of_locks_that_is_open_to_others_is_refused(temporary: Path, mode: int) -> None:
    lock_file(temporary).parent.chmod(mode)

    with pytest.raises(UnsafeLock, match="to be a folder of mode 0700"), host_lock("files of a test"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_locks_that_another_user_made_first_is_refused(temporary: Path) -> None:
    os.chown(lock_file(temporary).parent, 65534, -1)

    with pytest.raises(UnsafeLock, match="of user 65534: remove it, or set TMPDIR"), host_lock("files of a test"):
        pass


def test_a_link_in_the_place_of_the_folder_of_locks_is_refused(temporary: Path) -> None:
    folder = lock_file(temporary).parent
    folder.rename(temporary / "elsewhere")
    folder.symlink_to("elsewhere")

    with pytest.raises(UnsafeLock, match="to be a folder of mode 0700"), host_lock("files of a test"):
        pass


@pytest.mark.parametrize("kind", ["link", "link to a file", "folder", "pipe"])
def test_anything_but_a_file_in_the_place_of_a_lock_is_refused(temporary: Path, kind: str) -> None:
    path = lock_file(temporary)
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("elsewhere")
        if kind == "link to a file":
            path.with_name("elsewhere").touch()

    with pytest.raises(UnsafeLock, match=rf"expected {path} to be a file"), host_lock("files of a test"):
        pass
