"""The live table, on a real terminal."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TextIO

import anyio
import pytest
from tests.pipeline.flow_stages import Collect
from tests.pipeline.view.watched import MEMORY_HERE, STEPS, Silent, small_run
from tests.terminals import open_terminal

from penstock import source
from penstock.errors import StageFailed

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """A terminal in place of stdout and stderr, and what was written to it."""

    def __init__(self) -> None:
        self._master, slave = open_terminal()
        self.stdout: TextIO = os.fdopen(slave, "w")
        self.stderr: TextIO = os.fdopen(os.dup(slave), "w")
        self._read = bytearray()
        self._reader = threading.Thread(target=self._drain)
        self._reader.start()

    def _drain(self) -> None:
        while True:
            try:
                self._read += os.read(self._master, 65_536)
            except OSError:  # no process has the terminal open any more
                return

    def close(self) -> str:
        """Close it, and return what was written, without control sequences but those of the cursor."""
        self.stdout.close()
        self.stderr.close()
        self._reader.join()
        os.close(self._master)
        return self._read.decode()


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    made = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", made.stdout)
        patch.setattr(sys, "stderr", made.stderr)
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", "140")
        yield made


def text_of(written: str) -> str:
    """Return what was written without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)


async def test_the_table_is_drawn_and_stays_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        await small_run().run(view="auto")
    written = shown.close()

    last = text_of(written)[text_of(written).rindex(f"step {STEPS}/") :]
    for part in (
        f"step {STEPS}/{STEPS}",
        "reward",
        "accuracy",
        "SinkTrainer",
        "begun",
        f"best of step {STEPS}   reward 1, ",
        "completion     6 tokens �[2J [bold]",
        "ended: SinkTrainer",
    ):
        assert part in last
    assert MEMORY_HERE.search(last)


async def test_what_a_script_prints_and_logs_appears_above_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("tests.view")
    with terminal(monkeypatch) as shown:
        logger.addHandler(handler := logging.StreamHandler())
        kept, logger.propagate = handler.stream, False
        last = logging.lastResort  # follows sys.stderr by itself
        assert last is not None
        logger.addHandler(last)
        logger.warning("before")
        monkeypatch.setattr("penstock._pipeline.view.live.REFRESH_S", 0)
        async with anyio.create_task_group() as tasks:
            pipeline = small_run("print")
            tasks.start_soon(partial(pipeline.run, view="live"))
            await anyio.wait_all_tasks_blocked()
            logger.warning("during [the run]")
        logger.removeHandler(handler)
        logger.removeHandler(last)
        assert handler.stream is kept
        assert (sys.stdout, sys.stderr) == (shown.stdout, shown.stderr)
    lines = [line.strip() for line in text_of(shown.close()).splitlines()]

    assert {"before", "during [the run]", "printed [by the trainer]"} <= set(lines)


async def test_lines_that_a_thread_logs_stay_whole_while_the_table_opens_and_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger = logging.getLogger("tests.view")
    monkeypatch.setattr("penstock._pipeline.view.live.REFRESH_S", 0)
    logged: list[str] = []
    over = threading.Event()

    def log() -> None:
        while not over.is_set():
            logged.append(f"line {len(logged)}")
            logger.warning(logged[-1])

    with terminal(monkeypatch) as shown:
        logger.addHandler(handler := logging.StreamHandler())
        logger.propagate = False
        thread = threading.Thread(target=log)
        thread.start()
        try:
            for _ in range(5):
                await small_run().run(view="live")
        finally:
            over.set()
            thread.join()
            logger.removeHandler(handler)
    lines = {line.strip() for line in text_of(shown.close()).splitlines()}

    assert [line for line in logged if line not in lines] == []


@pytest.mark.parametrize("how", ["fails", "cancelled"])
async def test_a_run_that_ends_early_leaves_the_terminal_whole(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        if how == "fails":
            with pytest.raises(StageFailed, match="no such token"):
                await small_run("fail").run(view="live")
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(source(Silent()).sink(Collect()).run, view="live"))
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
        assert (sys.stdout, sys.stderr) == (shown.stdout, shown.stderr)
    written = shown.close()

    assert written.rfind(SHOW_CURSOR) > written.rfind(HIDE_CURSOR)


async def test_the_cursor_is_visible_during_the_run_too_for_a_process_may_be_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with terminal(monkeypatch) as shown:
        await small_run().run(view="live")
    written = shown.close()

    assert written.index(HIDE_CURSOR) < written.index(SHOW_CURSOR) < written.index("step ")


async def test_a_view_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        raise OSError(5, "the terminal is gone")

    monkeypatch.setattr("penstock._pipeline.view.live.table", fail)

    report = await small_run().run(view="live")

    assert report.steps == STEPS
    assert "view_failed" in caplog.text
