"""One module renames files and waits for the disk, and one locks files: whatever needs it calls them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
PRODUCT = ("schemas", "pipeline", "stages", "src")

RENAMES = {"rename", "renames", "fsync", "fdatasync"}
LOCKS = {"flock", "lockf", "F_SETLK", "F_SETLKW", "F_OFD_SETLK", "F_OFD_SETLKW", "F_OFD_GETLK"}


def renames_or_syncs(node: ast.AST) -> bool:
    """Return whether `node` is such a call; `replace` of a path has one argument, unlike those of texts and records."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "replace":
        return ast.unparse(node.func.value) == "os" or (len(node.args) == 1 and not node.keywords)
    return node.func.attr in RENAMES


def locks(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in LOCKS and ast.unparse(node.value) == "fcntl"


def test_files_are_renamed_synced_and_locked_in_one_place_each() -> None:
    found: dict[str, set[str]] = {"renames": set(), "locks": set()}

    for path in (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if renames_or_syncs(node):
                found["renames"].add(path.relative_to(ROOT).as_posix())
            if locks(node):
                found["locks"].add(path.relative_to(ROOT).as_posix())

    assert found == {"renames": {"pipeline/util/atomic_file.py"}, "locks": {"pipeline/util/lock_file.py"}}
