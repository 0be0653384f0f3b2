"""Functions that fill the caches of libraries, and the stage whose workers call one of them at the same time."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread
from tests.failsafe import FAILSAFE_S

from penstock import SendChannel, TrajectoryGroup, current, host_lock
from penstock.testing import group

REPOSITORY = "tiny/llama"


@dataclass(frozen=True)
class Together:
    """Sends one group, named by what `fill` returns, which all workers call when all have begun."""

    fill: Callable[[Path], str]
    folder: Path

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        filled = await anyio.to_thread.run_sync(self._fill)
        await outbox.send(group(instance_id=f"{current().worker.index}: {filled}"))

    def _fill(self) -> str:
        worker = current().worker
        (self.folder / f"began.{worker.index}").touch()
        for index in range(worker.count):
            wait_for(self.folder / f"began.{index}")
        return self.fill(self.folder)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + FAILSAFE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.01)


def repository(_: Path) -> str:
    """Download a repository; return the number of its files. The server learns which process asks for each."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (reads its settings, which are the worker's)

    return str(len(os.listdir(snapshot_download(REPOSITORY, user_agent={"pid": str(os.getpid())}))))  # noqa: PTH208


def rows_of_a_file(folder: Path) -> str:
    """Return the number of rows, and the file that holds them."""
    from datasets import load_dataset  # noqa: PLC0415 (as above)

    rows = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
    return f"{len(rows)} in {Path(rows.cache_files[0]['filename']).stat().st_ino}"


def rows_of_a_generator(folder: Path) -> str:
    """Return the sum of the rows; the first process to make them dies."""
    from datasets import Dataset  # noqa: PLC0415 (as above)

    return str(sum(Dataset.from_generator(make_rows, gen_kwargs={"folder": str(folder)})["number"]))


def make_rows(folder: str) -> Iterator[dict[str, int]]:
    yield {"number": 20}
    try:
        Path(folder, "first").touch(exist_ok=False)
    except FileExistsError:
        with Path(folder, "made").open("a") as made:
            made.write("x")
    else:
        os.kill(os.getpid(), signal.SIGKILL)
    yield {"number": 22}


EXTENSION = """
#include <Python.h>
static PyObject *twice(PyObject *module, PyObject *number) { return PyLong_FromLong(2 * PyLong_AsLong(number)); }
static PyMethodDef methods[] = {{"twice", twice, METH_O, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "twice", 0, -1, methods};
PyMODINIT_FUNC PyInit_twice(void) { return PyModule_Create(&module); }
"""


COMPILER = """#!/bin/sh
case " $* " in *" -c "*) if mkdir "{folder}/first" 2>/dev/null; then kill -9 $(cat "{folder}/pid"); fi;; esac
exec c++ "$@"
"""
"""The first time that it compiles, it kills the process that `extension` runs in."""


def extension(folder: Path) -> str:
    """Compile and load an extension, as docs/several-hosts.md has it."""
    from torch.utils import cpp_extension  # noqa: PLC0415 (slow)

    load_inline: Any = cpp_extension.load_inline
    build = folder / "twice"
    with host_lock(str(build)):
        if (build / "lock").exists():
            shutil.rmtree(build)
        build.mkdir(exist_ok=True)
        (folder / "pid").write_text(str(os.getpid()))
        twice = load_inline("twice", EXTENSION, no_implicit_headers=True, build_directory=str(build))
    return str(twice.twice(21))
