from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock._pipeline.util.named_objects import import_object
from penstock.errors import InvalidConfig


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder of our own, and forget what was imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_an_object_is_imported_from_a_file_of_the_current_folder(folder: Path) -> None:
    (folder / "my_scores.py").write_text("class Scores:\n    best = 7\n")

    assert import_object("my_scores:Scores.best") == 7


@pytest.mark.parametrize("name", ["math", "math:", ":sqrt", "math:sqrt(9)", "math sqrt", "", "../math:sqrt"])
def test_another_form_than_module_and_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfig, match=r"reward\.function: expected module:name, for example reward:accuracy"):
        import_object(name, root="reward.function")


def test_an_unknown_module_or_name_is_reported_with_the_nearest_one(folder: Path) -> None:
    (folder / "my_rewards.py").write_text("def accuracy(): ...\ndef _private(): ...\n")

    with pytest.raises(InvalidConfig, match=r"a file in .*, got 'my_reward'; did you mean 'my_rewards'\?"):
        import_object("my_reward:accuracy")
    with pytest.raises(InvalidConfig, match=r"a name in my_rewards, got 'acuracy'; did you mean 'accuracy'\?"):
        import_object("my_rewards:acuracy")
    with pytest.raises(InvalidConfig, match=r"got 'privat'$"):
        import_object("my_rewards:privat")


def test_an_error_within_the_module_is_not_taken_for_its_absence(folder: Path) -> None:
    (folder / "needy.py").write_text("import absent_module\n")

    with pytest.raises(ModuleNotFoundError, match="absent_module"):
        import_object("needy:accuracy")
