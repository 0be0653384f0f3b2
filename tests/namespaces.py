"""Commands that run in namespaces of their own: a folder is a small disk, read-only or another one; the clock differs.

Root may write anywhere whatever a folder's mode says, so read-only is a mount here, as a full disk is a small one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

NAMESPACE = ["unshare", "--map-root-user", "--mount", "sh", "-c"]


def small_disk(folder: Path, size: str) -> Sequence[str]:
    """Return the beginning of a command that is to find `folder` as an empty disk of `size` (16m)."""
    return _permitted([*NAMESPACE, f'mount -t tmpfs -o size={size} tmpfs "{folder}" && exec "$@"', "sh"])


def read_only(folder: Path) -> Sequence[str]:
    """Return the beginning of a command that is to find `folder` as it is, and read-only."""
    mounts = f'mount --bind "{folder}" "{folder}" && mount -o remount,bind,ro "{folder}"'
    return _permitted([*NAMESPACE, f'{mounts} && exec "$@"', "sh"])


def mounted(folders: Mapping[Path, Path]) -> Sequence[str]:
    """Return the beginning of a command that is to find other folders in place of the keys of `folders`."""
    mounts = " && ".join(f'mount --bind "{folder}" "{at}"' for at, folder in folders.items())
    return _permitted([*NAMESPACE, f'{mounts} && exec "$@"', "sh"])


def ahead(seconds: int) -> Sequence[str]:
    """Return the beginning of a command whose monotonic clock is `seconds` ahead of that of this process."""
    clocks = [f"--monotonic={seconds}", f"--boottime={seconds}"]
    return _permitted(["unshare", "--map-root-user", "--time", *clocks, "--fork", "--kill-child"])


def _permitted(prefix: Sequence[str]) -> Sequence[str]:
    """Return `prefix`, or skip the test where this machine does not permit it."""
    try:
        tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"expected the command unshare, got {error}")
    if tried.returncode:
        pytest.skip(f"expected to be allowed a namespace, got {tried.stderr.strip()}")
    return prefix


def printed_by(prefix: Sequence[str], *arguments: str) -> dict[str, str]:
    """Run Python with `arguments` behind `prefix`; return its lines `key: text`, by key."""
    ran = subprocess.run([*prefix, sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return dict(line.split(": ", 1) for line in ran.stdout.splitlines() if ": " in line)
