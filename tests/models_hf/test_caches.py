"""The caches of libraries, which several workers of a host begin to fill at the same time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.models_hf import caches
from tests.models_hf.hub_server import Hub, serving
from tests.processes.worker_sinks import Commit

from penstock import processes, source

FILES = {"config.json": b"{}", "tokenizer.json": b"{ }", "model.safetensors": bytes(range(256)) * 4096}


@pytest.fixture(autouse=True)
def _empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def hub(_empty_caches: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub(FILES)
    with serving(served) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        yield served


async def filled(fill: Callable[[Path], str], folder: Path, *, workers: int) -> tuple[list[str], int]:
    """Return what the calls of the workers return, and how many workers died."""
    sink = Commit()
    report = await source(caches.Together(fill, folder), on=processes(workers)).sink(sink).run()
    returned = [name.split(": ")[1] for name in sink.received]
    return returned, sum(worker.restarts for worker in report.statistics.stages[0].workers)


@pytest.mark.long
async def test_each_file_of_a_repository_is_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    assert await filled(caches.repository, tmp_path, workers=4) == (["3"] * 4, 0)

    assert sorted(hub.downloads) == sorted(FILES)


@pytest.mark.long
async def test_a_file_is_downloaded_by_another_worker_when_the_first_is_killed(hub: Hub, tmp_path: Path) -> None:
    hub.killing = "model.safetensors"

    assert await filled(caches.repository, tmp_path, workers=2) == (["3"] * 2, 1)

    assert hub.downloads.count("model.safetensors") == 2
    (snapshot,) = (tmp_path / "hf").glob("hub/*/snapshots/*")
    assert {file.name: file.read_bytes() for file in snapshot.iterdir()} == FILES


@pytest.mark.long
async def test_the_rows_of_a_file_are_cached_once(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps({'number': n})}\n" for n in range(100)))

    returned, restarts = await filled(caches.rows_of_a_file, tmp_path, workers=4)

    assert returned == returned[:1] * 4  # one file: it was not written again
    assert returned[0].startswith("100 in ")
    assert not restarts


@pytest.mark.long
async def test_rows_are_made_by_another_worker_when_the_first_is_killed(tmp_path: Path) -> None:
    assert await filled(caches.rows_of_a_generator, tmp_path, workers=2) == (["42"] * 2, 1)
    assert (tmp_path / "made").read_text() == "x"


@pytest.mark.skipif(shutil.which("ninja") is None or shutil.which("c++") is None, reason="needs ninja and a compiler")
@pytest.mark.long
async def test_an_extension_is_compiled_by_another_worker_when_the_first_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(caches.COMPILER.format(folder=tmp_path))
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))

    assert await filled(caches.extension, tmp_path, workers=2) == (["42"] * 2, 1)
