"""`penstock run` on a disk that becomes full, once for each amount of space that it may have left, and then resumed.

    python -m tests.resumption.script_of_a_full_disk DISK CONFIGURED

DISK is a disk of its own, and CONFIGURED a folder on another one. Prints lines `key: text`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch
from tests.limits.script_on_a_small_disk import full_but_for, report
from tests.resumption.test_damaged_configured_run import arguments, configured, ended, weights_of

ROOMS = 16
"""Amounts of space: from none to almost what the whole run takes."""


def free(disk: Path) -> int:
    space = os.statvfs(disk)
    return space.f_bavail * space.f_frsize


def main() -> None:
    torch.set_num_threads(1)
    disk, config = Path(sys.argv[1]), configured(Path(sys.argv[2]), None)
    folder, before = disk / "run", free(disk)
    assert not ended(*arguments(config, folder))
    weights, needed = weights_of(folder), before - free(disk)
    for room in range(0, needed, needed // ROOMS):
        shutil.rmtree(folder)
        with full_but_for(disk, room):
            report(f"full but for {room}", ended(*arguments(config, folder)) or "trained")
        folder.mkdir(exist_ok=True)
        error = ended(*arguments(config, folder))
        report(f"resumed after {room}", error or f"equal weights {weights_of(folder) == weights}")


main()
