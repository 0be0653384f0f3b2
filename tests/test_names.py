"""The public names: the modules that `import penstock` imports, and the names that need no extra."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from tests.public_surface import public_modules, public_names

from penstock import errors

EXTRAS = (
    *("torch", "safetensors", "aiohttp", "tokenizers", "starlette", "uvicorn", "httptools", "matplotlib"),
    *("datasets", "pyarrow", "tensorboardX", "wandb", "trl", "verl", "transformers", "requests"),
)
"""Packages that only extras install."""

NEEDS_EXTRA = {
    "penstock.torch": "torch",
    "penstock.losses": "torch",
    "penstock.models": "train",
    "penstock.integrations.prime_rl": "torch",
}
"""Public modules that cannot be imported without an extra."""

WITHOUT_EXTRAS = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""

INSPECT = """
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
def test_a_public_module_can_be_inspected_without_any_extra(name: str) -> None:
    python(WITHOUT_EXTRAS + INSPECT.format(name=name))


@pytest.mark.parametrize("name", NEEDS_EXTRA)
def test_a_public_module_that_needs_an_extra_names_the_command_that_installs_it(name: str) -> None:
    printed = python(
        WITHOUT_EXTRAS
        + f"""
try:
    import {name}
except ImportError as error:
    print(type(error).__name__, error)
"""
    )

    installs = rf"pip install .*\[{NEEDS_EXTRA[name]}\].*"
    assert re.fullmatch(
        rf"MissingExtra {name} needs (torch|safetensors), which is not installed: {installs}\n", printed
    )


def test_importing_penstock_does_not_import_torch() -> None:
    assert python("import sys, penstock; print('torch' in sys.modules)").strip() == "False"


def test_importing_the_parts_for_torch_does_not_import_its_compiler_which_takes_a_second() -> None:
    assert python("import sys, penstock.torch; print('torch._dynamo' in sys.modules)").strip() == "False"


OPEN = """
import anyio
from penstock import Worker
from penstock.errors import MissingExtra
from penstock.policies import HttpPolicy

async def open_policy():
    async with HttpPolicy(url="http://127.0.0.1:1", model="m").open(Worker()):
        pass

try:
    anyio.run(open_policy)
except MissingExtra as error:
    print(error)
"""


def test_a_policy_whose_extra_is_missing_raises_when_it_is_opened() -> None:
    printed = python(WITHOUT_EXTRAS + OPEN)

    assert re.fullmatch(r"HttpPolicy needs aiohttp.*: pip install .*\[http\].*\n", printed)


def test_a_public_name_is_in_one_public_module() -> None:
    names = [name for name, _ in public_names()]

    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_error_of_the_module_that_defines_them_is_public() -> None:
    inner = vars(sys.modules["penstock._pipeline.errors"])

    assert sorted(name for name, value in inner.items() if isinstance(value, type)) == errors.__all__
