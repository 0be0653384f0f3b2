"""Types to which several threads convert for the first time, at once."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

IN_EIGHT_THREADS = """
import sys, threading, types

from penstock._schemas.conversion import convert

FIELDS = "\\n".join(f"    a{n}: Annotated[int, msgspec.Meta(ge=0)] | None = {n}" for n in range(40))
SOURCE = f'''
from __future__ import annotations
from typing import Annotated
import msgspec

class Inner(msgspec.Struct, forbid_unknown_fields=True):
{FIELDS}

class Outer(msgspec.Struct, forbid_unknown_fields=True):
    inner: dict[str, Inner] = msgspec.field(default_factory=dict)
{FIELDS}
'''

sys.setswitchinterval(1e-6)
converted = []
for number in range(60):
    module = types.ModuleType(f"fresh{number}")
    sys.modules[module.__name__] = module
    exec(SOURCE, module.__dict__)
    barrier = threading.Barrier(8)

    def first(kind):
        barrier.wait()
        converted.append(convert({"inner": {"key": {"a3": 5}}}, kind).inner["key"].a3)

    threads = [threading.Thread(target=first, args=[module.Outer]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(converted.count(5))
"""


def test_threads_that_convert_to_a_type_for_the_first_time_at_once_get_their_values() -> None:
    ran = subprocess.run([sys.executable, "-c", IN_EIGHT_THREADS], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr  # msgspec alone ends the process by a segmentation fault
    assert int(ran.stdout) == 60 * 8


def test_nothing_else_converts_by_a_type_that_it_has_not_prepared() -> None:
    found = set()
    for path in (path for folder in ("schemas", "pipeline", "stages", "src") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"msgspec.convert", "msgspec.json.decode"}:
                typed = "convert" in ast.unparse(node.func) or any(word.arg == "type" for word in node.keywords)
                if typed:
                    found.add(path.relative_to(ROOT).as_posix())

    assert found == {"schemas/conversion.py"}
