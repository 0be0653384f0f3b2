"""Directions of imports: schemas ← pipeline ← stages ← stages.integrations ← src/penstock, examples, benchmarks, chaos.

Read from the source, so that an import inside a function counts as well: a direction is a direction at any depth.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = ["schemas", "pipeline", "stages", "stages/integrations", "src/penstock", "benchmarks", "chaos", "examples"]
"""Each may import those before it, and itself. Benchmarks and examples do not import each other."""

PIPELINE_FOLDERS = (
    *("errors", "util", "accounting", "trackers", "diagnosis", "channels", "weights", "graph"),
    *("servers", "workers", "durability", "view", "report", "runtime", "testing"),
)
"""The parts of pipeline/, each of which may import those before it, and itself."""

STAGES_FOLDERS = (
    *("contracts", "tokenizers", "http", "data", "losses", "advantages", "models", "rewards", "engines", "teachers"),
    *("agents", "sampling", "batching", "senders", "training", "sink", "training_run", "integrations"),
)
"""Those of stages/, in the same way."""

FOLDERS = {"pipeline": PIPELINE_FOLDERS, "stages": STAGES_FOLDERS}

MOST_METHODS = 30
"""Methods of a class, private ones and properties included."""

LARGER = {"TrajectoryQueue": 40, "TorchEngine": 37, "Endpoints": 32}
"""Classes that have more, and may not have more than these."""

OURS_AT_TOP_LEVEL = {"schemas", "pipeline", "stages"}
"""Import names that exist in a checkout only, and not in an installation."""

FOREIGN_TO_SCHEMAS = {"numpy", "msgspec", "yaml"}
"""Packages that records and configuration may use."""

TORCH_AT_MODULE_LEVEL = {
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "pipeline/weights/device_memory.py",
        "pipeline/weights/pinned_memory.py",
        "pipeline/weights/meta_model.py",
        "pipeline/weights/weight_tables.py",
        "pipeline/weights/weight_views.py",
        "stages/training/activation_memory.py",
        "stages/contracts/attention.py",
        "stages/contracts/routing.py",
        "stages/contracts/support.py",
        "stages/contracts/autocast.py",
        "stages/contracts/causal_model.py",
        "stages/losses/*.py",
        "stages/training/loss_scale.py",
        "stages/training/optimizers.py",
        "stages/contracts/varlen.py",
        "stages/training/step_clock.py",
        "stages/models/*.py",
        "stages/*/torch_*.py",
        "stages/integrations/prime_rl/*.py",
        "benchmarks/agents.py",
        "benchmarks/decoder.py",
        "benchmarks/gpu/*.py",
        "benchmarks/head_backward.py",
        "benchmarks/head_tiles.py",
        "benchmarks/routing.py",
        "benchmarks/shapes.py",
        "benchmarks/sampling.py",
        "benchmarks/step_memory.py",
        "benchmarks/trainers.py",
        "benchmarks/training.py",
        "benchmarks/weights.py",
    )
    for path in ROOT.glob(pattern)
}
"""Files that are nothing without tensors. Everything else imports torch in the function that needs it, if at all."""


class Import(NamedTuple):
    """One imported module, by its full name."""

    module: str
    line: int
    at_module_level: bool
    """Runs when the file is imported."""


@cache
def imports(source: str, package: str) -> list[Import]:
    """Return every module that `source`, a module of `package`, imports; `from a import b` counts as `a.b`."""
    found: list[Import] = []
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(source), True)]
    while nodes:
        node, at_module_level = nodes.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [Import(module, node.lineno, at_module_level) for module in _modules(node, package)]
        elif isinstance(node, ast.stmt | ast.Module | ast.excepthandler | ast.match_case):  # others have no statement
            deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(node)
            nodes += [(child, at_module_level and not deferred) for child in ast.iter_child_nodes(node)]
    return found


def _modules(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        base = parents[: len(parents) - node.level + 1] if node.level else []
        return [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
    return []


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def layer_of_file(path: Path) -> str:
    """Return the layer of a file."""
    relative = path.relative_to(ROOT).as_posix()
    return max((layer for layer in LAYERS if relative.startswith(layer + "/")), key=len)


def layer_of_module(module: str) -> str | None:
    """Return the layer of an imported module; None if it is not ours."""
    top, _, rest = module.partition(".")
    if top in {"examples", "benchmarks", "chaos"}:
        return top
    if top != "penstock":
        return None
    folder = rest.removeprefix("_").replace(".", "/")
    below = [layer for layer in LAYERS[:4] if f"{folder}/".startswith(layer + "/")]
    return max(below, key=len) if below else "src/penstock"


def package_of(path: Path) -> str:
    """Return the package from which a file's relative imports start."""
    parts = path.relative_to(ROOT).parent.parts
    inside = ("penstock", f"_{parts[0]}", *parts[1:])
    return ".".join(inside if parts[0] in OURS_AT_TOP_LEVEL else parts).removeprefix("src.")


def sources() -> list[Path]:
    """Return every file that has a layer, none of them twice through a link."""
    found = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
    return [path for path in dict.fromkeys(found) if path.resolve() == path]


def top_of(found: Import) -> str:
    return found.module.partition(".")[0]


def wrong_imports(paths: list[Path], is_wrong: Callable[[Path, Import], bool]) -> list[str]:
    """Return the imports of these files that `is_wrong` names, each with its file and line."""
    return [
        f"{path.relative_to(ROOT).as_posix()}:{each.line}: {each.module}"
        for path in paths
        for each in imports(path.read_text(), package_of(path))
        if is_wrong(path, each)
    ]


def upward(layer: str, found: Import) -> bool:
    """Return whether an import runs against the arrows."""
    target = layer_of_module(found.module)
    if target is None:
        return False
    if target in {"examples", "benchmarks", "chaos"}:
        return target != layer
    return LAYERS.index(target) > LAYERS.index(layer)


def test_imports_run_along_the_arrows() -> None:
    wrong = wrong_imports(sources(), lambda path, each: upward(layer_of_file(path), each))

    assert not wrong, "\n".join(wrong)


def test_no_module_imports_a_name_that_only_a_checkout_has() -> None:
    wrong = wrong_imports(sources(), lambda _, each: top_of(each) in OURS_AT_TOP_LEVEL)

    assert not wrong, "\n".join(wrong)


def test_the_folders_of_a_layer_depend_on_each_other_in_one_direction() -> None:
    inside = [path for path in sources() if path.relative_to(ROOT).parts[0] in FOLDERS and path.parent.parent != ROOT]

    wrong = wrong_imports(inside, from_a_later_folder)

    assert not wrong, "\n".join(wrong)


def from_a_later_folder(path: Path, found: Import) -> bool:
    """Return whether a file of a folder imports from one of those after it in the same layer."""
    top, folder = path.relative_to(ROOT).parts[:2]
    module = found.module.split(".")
    below = FOLDERS[top][: FOLDERS[top].index(folder) + 1]
    return module[:2] == ["penstock", f"_{top}"] and module[2] not in below


def test_no_files_import_each_other_in_a_circle() -> None:
    """At any depth, and for types only too: none of them can be read, or changed, alone."""
    behind = reached()

    circles = {
        frozenset(other.rpartition(".")[2] for other in modules if module in behind[other])
        for module, modules in behind.items()
        if module in modules
    }

    assert not circles


def reached() -> dict[str, set[str]]:
    """Return for each file of the three folders those that it imports, directly or through others; by their modules."""
    files = {module_of(path): path for path in sources() if path.relative_to(ROOT).parts[0] in {*FOLDERS, "schemas"}}
    direct = {
        module: {
            known
            for each in imports(path.read_text(), package_of(path))
            for known in (each.module, each.module.rpartition(".")[0])
            if known in files and known != module
        }
        for module, path in files.items()
    }
    return {module: everything_behind(module, direct) for module in files}


def everything_behind(module: str, direct: dict[str, set[str]]) -> set[str]:
    found, waiting = set[str](), [module]
    while waiting:
        new = direct[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def module_of(path: Path) -> str:
    own = "" if path.stem == "__init__" else f".{path.stem}"
    return package_of(path) + own


def test_a_class_name_denotes_one_class() -> None:
    defined: dict[str, list[str]] = {}
    for path in sources():
        if path.relative_to(ROOT).parts[0] in {*FOLDERS, "schemas", "src"}:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    defined.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())

    assert {name: paths for name, paths in defined.items() if len(paths) > 1} == {}


def test_a_reader_can_name_what_lives_in_a_class() -> None:
    """One with more methods than these holds several things, each with state of its own: they become parts."""
    methods = {
        node.name: sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
        for path in sources()
        if path.relative_to(ROOT).parts[0] in {*FOLDERS, "schemas", "src"}
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }

    assert {name: count for name, count in methods.items() if count > LARGER.get(name, MOST_METHODS)} == {}


def test_torch_is_imported_where_tensors_live() -> None:
    without = [
        path
        for path in sources()
        if path.relative_to(ROOT).as_posix() not in TORCH_AT_MODULE_LEVEL and layer_of_file(path) != "examples"
    ]

    wrong = wrong_imports(without, imports_torch_with_the_file)

    assert not wrong, "\n".join(wrong)


def imports_torch_with_the_file(_: Path, found: Import) -> bool:
    return found.at_module_level and top_of(found) == "torch"


def test_two_thirds_of_the_test_files_import_public_names_of_penstock_only() -> None:
    """Such a test survives a refactoring. Names in a text, which is what `monkeypatch` replaces, do not count."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))

    private = {path for path in files if any(is_private(each) for each in imports(path.read_text(), package_of(path)))}

    assert 3 * len(private) <= len(files), "\n".join(sorted(str(path.relative_to(ROOT)) for path in private))


def is_private(found: Import) -> bool:
    """Return whether an import is of a private module of penstock, or of a name in one."""
    return top_of(found) == "penstock" and any(
        part.startswith("_") and not part.endswith("__") for part in found.module.split(".")
    )


def test_records_import_numpy_and_msgspec_only() -> None:
    allowed = sys.stdlib_module_names | FOREIGN_TO_SCHEMAS | {"penstock"}

    wrong = wrong_imports(sorted((ROOT / "schemas").glob("*.py")), lambda _, each: top_of(each) not in allowed)

    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("layer", "statement"),
    [
        ("schemas", "from .._pipeline import errors"),
        ("schemas", "from .. import _stages"),
        ("pipeline", "import penstock._stages.batching.batcher"),
        ("stages", "def run():\n    from .integrations import gem"),
        ("stages/integrations", "from penstock import source"),
        ("src/penstock", "import examples.hello"),
        ("benchmarks", "from examples.arithmetic import task"),
        ("examples", "from benchmarks import transport"),
    ],
)
def test_an_import_against_the_arrows_is_detected(layer: str, statement: str) -> None:
    package = package_of(ROOT / layer / "file.py")

    assert any(upward(layer, each) for each in imports(statement, package))


@pytest.mark.parametrize(
    ("layer", "statement"),
    [
        ("pipeline", "from .._schemas import TrajectoryGroup"),
        ("stages", "from .._pipeline.errors import MissingExtra"),
        ("stages/integrations", "from ..batcher import Batcher"),
        ("src/penstock", "from ._stages import batcher"),
        ("examples", "from penstock import source"),
        ("examples", "import numpy"),
    ],
)
def test_an_import_along_the_arrows_is_accepted(layer: str, statement: str) -> None:
    package = package_of(ROOT / layer / "file.py")

    assert not any(upward(layer, each) for each in imports(statement, package))


@pytest.mark.parametrize(
    ("statement", "private"),
    [
        ("from penstock._stages.http.gate import GenerationGate", True),
        ("def test():\n    import penstock._cli", True),
        ("from penstock import _stages", True),
        ("from penstock import __version__", False),
        ("from penstock.testing import group", False),
        ("from tests._helpers import made", False),
    ],
)
def test_a_private_import_is_found_at_any_depth(statement: str, private: bool) -> None:  # noqa: FBT001
    assert any(map(is_private, imports(statement, "tests"))) == private


def test_torch_inside_a_function_or_for_types_alone_does_not_count_as_module_level() -> None:
    source = "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch\n"

    assert [each.at_module_level for each in imports(source, "penstock._stages")] == [False, False]
