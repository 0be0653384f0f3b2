"""The identity of the host of this process, as far as shared memory and Unix sockets reach."""

from __future__ import annotations

import os
from pathlib import Path


def host_identity() -> str:
    """Return a text that is equal in two processes if they can share memory through files and sockets.

    That is the boot of the kernel, the namespaces of processes and mounts (they differ between containers), and the
    user, because only the same one may open the sockets.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt")]  # noqa: PTH115 (no path, a name)
    return " ".join([boot, *namespaces, str(os.getuid())])
