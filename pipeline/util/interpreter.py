"""Another Python interpreter for a child process: one with packages of its own, penstock among them.

Its module path is its own: `PYTHONPATH` and `PYTHONHOME` are for the interpreter of this process, and are not passed.
"""

from __future__ import annotations

import os
import subprocess

from ..errors import InvalidConfig, MissingExtra
from .installation import NAME, install_command

PROBE = f"from importlib.metadata import version; print(version({NAME!r}))"

OF_THIS_INTERPRETER = frozenset({"PYTHONPATH", "PYTHONHOME"})


def command_of(python: str, module: str, argument: str) -> list[str]:
    """Return a command that calls `main(argument)` of `module` with `python`; modules are also found in its folder."""
    # The folder is the last: one that is called penstock does not hide the package.
    code = f"import os, sys; sys.path.append(os.getcwd()); from {module} import main; main(sys.argv[1])"
    return [python, "-P", "-c", code, argument]


def environment_of() -> dict[str, str]:
    """Return the environment variables for a process of another interpreter."""
    return {name: value for name, value in os.environ.items() if name not in OF_THIS_INTERPRETER}


def check_interpreter(python: str, timeout_s: float, *, needs: str = "http") -> None:
    """Check that `python` is an interpreter with this version of penstock. Blocks.

    Args:
        python: its path, or its name.
        timeout_s: seconds that it may take to answer.
        needs: the extra that the command which installs penstock names.

    Raises:
        InvalidConfig: it is no interpreter, or too old.
        MissingExtra: it has another version, or none.
        TimeoutError: it does not answer within `timeout_s`.
    """
    try:
        probed = subprocess.run(  # noqa: S603 (the user's interpreter)
            [python, "-P", "-c", PROBE],
            env=environment_of(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except OSError as error:
        raise InvalidConfig(f"python: expected a Python interpreter, got {python!r}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error
    found, missing = probed.stdout.strip(), "PackageNotFoundError" in probed.stderr
    if probed.returncode and not missing:
        last = (probed.stderr.strip().splitlines() or [f"exit status {probed.returncode}"])[-1]
        raise InvalidConfig(f"python: expected a Python interpreter of version 3.11 or later, got {python!r}: {last}")
    from importlib.metadata import distributions  # noqa: PLC0415 (it takes 60 ms, and few runs have another interpreter)

    ours = {
        installed.version for installed in distributions(name=NAME)
    }  # none where it is on the path of modules alone
    if missing or (ours and found not in ours):
        expected = " or ".join(ours)
        raise MissingExtra(
            f"python: expected {python} to have {NAME} {expected}, got {found or 'none'}: "
            f"{python} -m {install_command(needs)}"
        )
