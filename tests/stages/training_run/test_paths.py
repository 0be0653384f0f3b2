"""Paths of a configuration: of the folder of its file, of the user's home, or names of Hugging Face's hub."""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import pytest

from penstock._pipeline.util.hub import dataset_path, model_folder
from penstock._stages.data.parquet_shards import sets_among
from penstock.data import PromptDataset
from penstock.errors import InvalidConfig, InvalidData, MissingExtra
from penstock.policies import PretrainedTokenizer
from penstock.runs import RunConfig, load_run_config

FILE = """
model: {path: ./model}
data: {path: data/train.jsonl}
reward: {}
evaluation: {sets: [{path: ../held.jsonl}, {path: /data/test.jsonl}]}
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a configuration into a folder beside the current one."""
    for name in ("project", "elsewhere", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "project" / "config.yaml").write_text(FILE)
    return tmp_path / "project" / "config.yaml"


def paths_of(config: RunConfig) -> list[str]:
    sets = config.evaluation.sets if config.evaluation else ()
    return [config.model.path, config.data.path, config.folder, *(each.path for each in sets)]


def test_paths_in_a_file_begin_at_its_folder(path: Path) -> None:
    project = path.parent

    found = paths_of(load_run_config(path))

    expected = [project / "model", project / "data/train.jsonl", project / "run", project / "../held.jsonl"]
    assert found == [*map(str, expected), "/data/test.jsonl"]


def test_also_where_the_path_of_the_file_is_relative(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent.parent)

    assert paths_of(load_run_config("project/config.yaml"))[:3] == [
        "project/model",
        "project/data/train.jsonl",
        "project/run",
    ]


def test_in_the_current_folder_they_stay_as_they_are(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)

    assert paths_of(load_run_config("config.yaml"))[:4] == ["./model", "data/train.jsonl", "run", "../held.jsonl"]


def test_paths_of_arguments_and_variables_begin_at_the_current_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK__FOLDER", "out")

    found = load_run_config(path, ["model.path=other", "data.path=more/train.jsonl"])

    assert paths_of(found)[:3] == ["other", "more/train.jsonl", "out"]


@pytest.mark.parametrize("key", ["model.path", "data.path", "folder", "server.weights", "placement.joining.key"])
def test_a_tilde_is_the_home_of_the_user(key: str, path: Path) -> None:
    home = path.parent.parent / "home"
    server = ["engine=vllm", "server.url=http://h:1"] if key == "server.weights" else []

    found: Any = load_run_config(path, [*server, f"{key}=~/models/a"])

    for part in key.split("."):
        found = getattr(found, part)
    assert found == str(home / "models/a")


def test_also_in_a_file_and_in_a_mapping(path: Path) -> None:
    home = path.parent.parent / "home"
    path.write_text("model: {path: ~/m}\ndata: {sets: [{path: ~/d.jsonl}]}\nreward: {}\n")
    values = {"model": {"path": "~/m"}, "data": {"sets": [{"path": "~/d.jsonl"}]}, "reward": {}}

    for config in (load_run_config(path), load_run_config(values)):
        assert (config.model.path, config.data.sets[0].path) == (str(home / "m"), str(home / "d.jsonl"))


def test_code_that_a_file_names_may_be_beside_it(path: Path) -> None:
    (path.parent / "beside_the_file.py").write_text("def loss(): return 3\n")

    load_run_config(path)

    import beside_the_file  # type: ignore[import-not-found]  # noqa: PLC0415 (the rule)

    assert beside_the_file.loss() == 3


def test_a_name_of_the_hub_in_a_file_stays_as_it_is(path: Path) -> None:
    path.write_text("model: {path: Qwen/Qwen2.5-0.5B}\ndata: {path: openai/gsm8k/main/train}\nreward: {}\n")

    assert paths_of(load_run_config(path))[:2] == ["Qwen/Qwen2.5-0.5B", "openai/gsm8k/main/train"]


def test_it_is_a_path_where_the_folder_of_the_file_has_its_first_part(path: Path) -> None:
    (path.parent / "Qwen").mkdir()
    path.write_text("model: {path: Qwen/Qwen2.5-0.5B}\ndata: {path: d.jsonl}\nreward: {}\n")

    assert load_run_config(path).model.path == str(path.parent / "Qwen/Qwen2.5-0.5B")


# -- the hub -------------------------------------------------------------------------------------------------------


class FakeHub(ModuleType):
    """Repositories, in the form of huggingface_hub, whose files are written where they are downloaded."""

    def __init__(self, folder: Path, files: list[str], *, is_online: bool = True) -> None:
        super().__init__("huggingface_hub")
        self.folder, self.files, self.is_online = folder, files, is_online
        self.downloads: list[tuple[str, str]] = []

    def list_repo_files(self, repo_id: str, *, repo_type: str) -> list[str]:
        assert repo_id.count("/") == 1
        assert repo_type == "dataset"
        if not self.is_online:
            raise ConnectionError("no\nnetwork")
        return self.files

    def snapshot_download(self, repo_id: str, *, repo_type: str, local_files_only: bool = False, **_: Any) -> str:
        if not self.is_online and not self.folder.exists():
            raise ConnectionError("no\nnetwork")
        self.downloads.append((repo_id, repo_type))
        for name in [] if local_files_only else self.files:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).touch()
        return str(self.folder)


GSM8K = [
    "README.md",
    *(f"{name}/{split}-00000-of-00001.parquet" for name in ("main", "alt") for split in ("train", "test")),
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.chdir(tmp_path)
    fake = FakeHub(tmp_path / "cache", GSM8K)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_a_model_of_the_hub_is_downloaded(hub: FakeHub) -> None:
    assert model_folder("Qwen/Qwen2.5-0.5B") == str(hub.folder)
    assert hub.downloads == [("Qwen/Qwen2.5-0.5B", "model")]


@pytest.mark.parametrize("name", ["model", "./Qwen/Qwen2.5", "/models/Qwen", "a/b.jsonl", "here/model", "../a/b"])
def test_a_path_is_not(name: str, hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()

    assert model_folder(name) == name
    assert dataset_path(name, sets_among) == name
    assert hub.downloads == []


@pytest.mark.parametrize(
    ("name", "within"),
    [("a/one/main/train", "main/train"), ("a/two/alt/test-00000-of-00001.parquet", "alt/test-00000-of-00001.parquet")],
)
def test_a_set_of_the_hub_is_downloaded(name: str, within: str, hub: FakeHub) -> None:
    assert dataset_path(name, sets_among) == str(hub.folder / within)


def test_a_repository_of_several_sets_is_refused_with_their_names_before_a_download(hub: FakeHub) -> None:
    with pytest.raises(
        InvalidConfig, match=r"got 4: take one of b/three/alt/test, b/three/alt/train, b/three/main/test"
    ):
        dataset_path("b/three", sets_among)
    with pytest.raises(InvalidConfig, match=r"b/three/main/trian: expected one set of the hub, got 0: take one of"):
        dataset_path("b/three/main/trian", sets_among)
    assert hub.downloads == []


def test_without_a_network_the_files_of_an_earlier_download_are_used(hub: FakeHub) -> None:
    dataset_path("c/four/main/train", sets_among)
    hub.is_online = False

    assert dataset_path("c/four/alt/train", sets_among) == str(hub.folder / "alt/train")


def test_what_the_hub_answers_is_told_in_one_line(hub: FakeHub) -> None:
    hub.is_online = False

    for call in (model_folder, lambda name: dataset_path(name, sets_among)):
        with pytest.raises(InvalidConfig, match=r"d/five: expected a folder or a name .*ConnectionError: no network$"):
            call("d/five")


def test_without_huggingface_hub_a_name_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(MissingExtra, match=r"pip install huggingface_hub, or give a folder: hf download Qwen/Qwen3-8B"):
        model_folder("Qwen/Qwen3-8B")
    with pytest.raises(MissingExtra, match=r"hf download openai/gsm8k --repo-type dataset --local-dir FOLDER"):
        dataset_path("openai/gsm8k/main/train", sets_among)


def test_files_of_a_repository_are_sets_by_their_folders_and_names() -> None:
    names = ["data/a-00000-of-00002.parquet", "data/a-00001-of-00002.parquet", "x/0000.parquet", "b.jsonl", "c.csv"]

    assert sorted(sets_among(map(PurePosixPath, names))) == ["b.jsonl", "data/a", "x"]


# -- absent paths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "nearest"), [("Qwen2.5-0.5", "Qwen2.5-0.5B"), ("modles/Qwen2.5-0.5B", "models"), ("models/qwen", "Qwen3")]
)
def test_the_nearest_name_beside_an_absent_path_is_told(
    path: str, nearest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen2.5-0.5B").mkdir()
    (tmp_path / "models" / "Qwen3").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    message = rf"got nothing there \(looked from .*\); did you mean '{nearest}'\?"
    with pytest.raises(InvalidConfig, match=rf"expected the folder of a model at {path}, {message}"):
        PretrainedTokenizer(path)
    with pytest.raises(InvalidData, match=rf"expected a file or a folder at {path}, {message}"):
        PromptDataset(path)()
