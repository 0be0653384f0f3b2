"""The public names: the modules that `import penstock` imports, and the names that need no extra."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable

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
module = importlib.import_module(name)
assert all(hasattr(module, each) for each in module.__all__)
exec(f"from {name} import *")
assert dict(inspect.getmembers(module)).keys() >= set(module.__all__)
assert "misspelled" not in dir(module) and not hasattr(module, "misspelled")
pydoc.render_doc(module)
"""

REFUSED = """
try:
    importlib.import_module(name)
except ImportError as error:
    print(type(error).__name__, error)
"""

EACH_IN_A_FORK = """
import importlib, inspect, os, pydoc, traceback
import penstock  # Python imports it before any module of it

for name in {names}:
    if not os.fork():
        try:
            exec({script!r})
        except BaseException:
            print(name, "raised")
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


def python(script: str) -> str:
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def without_extras(script: str, names: Iterable[str]) -> str:
    """Run a script for each module `name`, in a process that has imported no other one; return what was printed."""
    return python(WITHOUT_EXTRAS + EACH_IN_A_FORK.format(names=list(names), script=script))


MODULES = [module.__name__ for module in public_modules()]


def test_every_public_module_can_be_inspected_without_any_extra() -> None:
    assert without_extras(INSPECT, [name for name in MODULES if name not in NEEDS_EXTRA]) == ""


def test_a_public_module_that_needs_an_extra_names_the_command_that_installs_it() -> None:
    lines = without_extras(REFUSED, NEEDS_EXTRA).splitlines()

    for line, (name, extra) in zip(lines, NEEDS_EXTRA.items(), strict=True):
        installs = rf"pip install .*\[{extra}\].*"
        assert re.fullmatch(rf"MissingExtra {name} needs (torch|safetensors), which is not installed: {installs}", line)


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
