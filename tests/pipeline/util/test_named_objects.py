from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock._pipeline.util.named_objects import call_object, import_object
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


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import absent_module\n", "ModuleNotFoundError: No module named 'absent_module' (needy.py, line 1)"),
        ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax (needy.py, line 2)"),
        ("import json\njson.loads('{')\n", "property name enclosed in double quotes: line 1 column 2"),
        ("from json import absent\n", "ImportError: cannot import name 'absent' from 'json'"),
        ("raise ValueError('two\\nlines')\n", "ValueError: two lines (needy.py, line 1)"),
        ("exit(3)\n", "SystemExit: 3 (needy.py, line 1)"),
        ("undefined\n", "NameError: name 'undefined' is not defined (needy.py, line 1)"),
    ],
)
def test_an_error_within_the_module_is_told_with_its_place(source: str, message: str, folder: Path) -> None:
    (folder / "needy.py").write_text(source)

    with pytest.raises(InvalidConfig) as refused:
        import_object("needy:accuracy", "reward.function")

    assert str(refused.value).startswith(
        "reward.function: expected a module that can be imported, got 'needy', which raised "
    )
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("make = 3\n", "config: prepare: expected a function, got needy:make, which is int"),
        ("def make():\n    return 1\n", "TypeError: make() takes 0 positional arguments but 1 was given"),
        ("def make(config):\n    return {}['a']\n", "got KeyError: 'a' (needy.py, line 2)"),
        ("import sys\ndef make(config):\n    sys.exit(1)\n", "got SystemExit: 1 (needy.py, line 3)"),
    ],
)
def test_an_error_of_a_named_function_is_told_with_its_place(source: str, message: str, folder: Path) -> None:
    (folder / "needy.py").write_text(source)

    with pytest.raises(InvalidConfig) as refused:
        call_object("needy:make", "config: prepare", None)

    assert message in str(refused.value)
