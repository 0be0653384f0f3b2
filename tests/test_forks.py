"""A fork in place of an interpreter has what `Popen` gives a new process, and ends as one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.forks import forking

SHOW = """
import os, sys
print(os.getppid(), os.getcwd(), os.environ["GIVEN"], sys.argv, __name__, sys.stdin.read(), "penstock" in sys.modules)
sys.exit(3)
"""


def ran(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_a_fork_is_a_child_with_the_variables_the_folder_and_the_streams_of_a_new_process(tmp_path: Path) -> None:
    shown = ran(SHOW, "one", cwd=tmp_path, env={"GIVEN": "7"}, input="read")

    assert shown.stdout == f"{os.getpid()} {tmp_path} 7 ['-c', 'one'] __main__ read True\n"
    assert shown.returncode == 3


def test_an_exception_is_printed_and_a_signal_is_the_status() -> None:
    raised = ran("raise ValueError('sand')")
    killed = ran("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")

    assert raised.returncode == 1
    assert raised.stderr.endswith("ValueError: sand\n")
    assert killed.returncode == -signal.SIGKILL


def test_a_fork_has_only_the_descriptors_that_it_was_given() -> None:
    listed = "import os; print(*os.listdir('/proc/self/fd'))"
    reader, writer = os.pipe()

    with open(writer, "wb"), open(reader, "rb"):  # noqa: PTH123 (descriptors)
        given = ran(listed, pass_fds=(reader,))

    found = set(map(int, given.stdout.split()))
    assert {0, 1, 2, reader} < found
    assert len(found) == 5  # one is that of the listing


def test_a_module_and_a_script_have_the_arguments_and_the_path_that_python_gives_them(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(
        "import os, sys; print(__name__, __file__, sys.argv, os.path.abspath(sys.path[0]))"
    )
    path = tmp_path / "shown.py"

    outputs = [
        subprocess.run([sys.executable, *program, "1"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for program in (["-m", "shown"], [str(path)])
    ]

    assert outputs == [f"__main__ {path} {[str(path), '1']} {tmp_path}\n"] * 2


def test_a_fork_shows_its_own_command() -> None:
    shown = ran("print(open('/proc/self/cmdline').read().rstrip('\\0').split('\\0')[2:])", "one")

    assert shown.stdout.endswith(", 'one']\n")


STARTS = """
import subprocess, sys
code = "import os, sys; print(os.getppid(), 'penstock' in sys.modules)"
print(os.getpid(), subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout, end="")
"""


def test_a_nested_fork_starts_forks_as_its_own_children() -> None:
    with forking(nested=True) as nested, nested.in_place_of_interpreters():
        started = ran("import os" + STARTS)

    parent, parent_of_child, imported = started.stdout.split()
    assert (parent_of_child, imported) == (parent, "True")


def test_a_variable_that_imports_read_starts_an_interpreter() -> None:
    started = ran("import sys; print('penstock' in sys.modules)", env={**os.environ, "HF_HOME": "other"})

    assert started.stdout == "False\n"


EXECUTES = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)
opened = os.open("/dev/null", os.O_RDONLY)
os.execvp(sys.executable, [sys.executable, "-c", sys.argv[1], str(opened)])
"""

OF_AN_EXECUTED_PROGRAM = """
import os, signal, sys
print("penstock" in sys.modules, os.path.exists(f"/proc/self/fd/{sys.argv[1]}"), signal.getsignal(signal.SIGTERM).name)
"""


def test_a_subreaper_becomes_the_interpreter_that_it_executes_and_keeps_no_descriptor_and_no_handler() -> None:
    command = [sys.executable, "-I", "-S", "-c", EXECUTES]

    became = subprocess.run([*command, OF_AN_EXECUTED_PROGRAM], capture_output=True, text=True, check=False)
    failed = subprocess.run([*command, "raise ValueError('sand')"], capture_output=True, text=True, check=False)

    assert became.stdout == "True False SIG_DFL\n"
    assert failed.returncode == 1
    assert failed.stderr.endswith("ValueError: sand\n")


def test_a_path_with_another_penstock_starts_an_interpreter(tmp_path: Path) -> None:
    (tmp_path / "penstock").mkdir()

    started = ran("import sys; print('penstock' in sys.modules)", env={**os.environ, "PYTHONPATH": str(tmp_path)})

    assert started.stdout == "False\n"
