"""The public names: the imports that `import penstock` costs, and what works without any extra."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from types import ModuleType

import pytest
from tests.public_surface import public_modules, public_names

from penstock.errors import MissingExtra
from penstock.policies import HttpPolicy

EXTRAS = ("torch", "safetensors", "xxhash", "aiohttp", "tokenizers", "starlette", "uvicorn", "httptools", "matplotlib")
"""Packages that only extras install."""

NEEDS_EXTRA = {"penstock.torch": "torch", "penstock.losses": "torch"}
"""Public modules that are nothing without an extra."""

WITHOUT_EXTRAS = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""

LOOK_AT = """
import importlib, inspect, pydoc
module = importlib.import_module({name!r})
assert all(hasattr(module, name) for name in module.__all__)
exec(f"from {name} import *")
assert dict(inspect.getmembers(module)).keys() >= set(module.__all__)
assert "misspelled" not in dir(module) and not hasattr(module, "misspelled")
pydoc.render_doc(module)
"""


def python(script: str) -> str:
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


MODULES = [module.__name__ for module in public_modules()]


@pytest.mark.parametrize("name", [name for name in MODULES if name not in NEEDS_EXTRA])
def test_a_public_module_can_be_looked_at_without_any_extra(name: str) -> None:
    python(WITHOUT_EXTRAS + LOOK_AT.format(name=name))


@pytest.mark.parametrize("name", NEEDS_EXTRA)
def test_a_public_module_that_needs_an_extra_says_how_to_install_it(name: str) -> None:
    told = python(
        WITHOUT_EXTRAS
        + f"""
try:
    import {name}
except ImportError as error:
    print(type(error).__name__, error)
"""
    )

    installs = re.escape(f"pip install 'penstock[{NEEDS_EXTRA[name]}]'")
    assert re.fullmatch(rf"MissingExtra {name} needs (torch|xxhash), which is not installed: {installs}\n", told)


def test_importing_penstock_does_not_import_torch() -> None:
    assert python("import sys, penstock; print('torch' in sys.modules)").strip() == "False"


async def test_a_policy_whose_extra_is_missing_says_so_when_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock import Worker  # noqa: PLC0415

    for name in [name for name in sys.modules if name.startswith(("aiohttp", "penstock._stages.engines"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)

    with pytest.raises(MissingExtra, match=r"HttpPolicy needs aiohttp.*: pip install 'penstock\[http\]'"):
        async with HttpPolicy(url="http://127.0.0.1:1", model="m").open(Worker()):
            pass


@pytest.mark.parametrize("module", public_modules(), ids=lambda module: module.__name__)
def test_public_names_are_real(module: ModuleType) -> None:
    assert [name for name in module.__all__ if getattr(module, name) is None] == []


def test_a_public_name_stands_in_one_public_module() -> None:
    names = [name for name, _ in public_names()]

    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize(
    ("module", "sources"), [("errors", ["errors"]), ("testing", ["testing.conformance", "testing.drive"])]
)
def test_what_is_public_in_the_pipeline_folder_is_public_at_the_top(module: str, sources: list[str]) -> None:
    inner = [name for source in sources for name in importlib.import_module(f"penstock._pipeline.{source}").__all__]

    assert sorted(inner) == importlib.import_module(f"penstock.{module}").__all__
