"""The default key of tcp channels on loopback: one for each user, created on first use.

Every process of a user finds the same file. Of two processes that create it at the same time, both use the first.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..errors import InvalidKey, KeyUnavailable
from .keys import ChannelKey


def default_key_path() -> Path:
    """Return the path of this user's key: `penstock/channel.key` in $XDG_CONFIG_HOME, or else in `~/.config`."""
    configured = os.environ.get("XDG_CONFIG_HOME")
    folder = Path(configured) if configured else Path("~/.config").expanduser()
    return folder / "penstock" / "channel.key"


def default_key() -> ChannelKey:
    """Return this user's key, and create it if there is none. Blocks: use it in a worker thread.

    Raises:
        InvalidKey: the file belongs to another user, others may read it, or it holds no key.
        KeyUnavailable: the file can be neither read nor created.
    """
    path: Path | str = "~/.config"
    try:
        path = default_key_path()
        if not path.exists():
            _make(path)
        return _load(path)
    except (OSError, RuntimeError) as error:  # pathlib raises RuntimeError for a user without a home folder
        raise KeyUnavailable(
            f"expected to find or make the key of this user's tcp channels at {path}, got {error}: "
            f"make one elsewhere with Key.create(path) and give both ends key=Key.load(path), or set XDG_CONFIG_HOME "
            f"to a folder that this user may write"
        ) from error


def _load(path: Path) -> ChannelKey:
    owner, user = path.lstat().st_uid, os.geteuid()
    if owner != user:
        raise InvalidKey(f"expected {path} to belong to this user (uid {user}), got uid {owner}: remove it")
    return ChannelKey.load(path)


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):  # another process was first
        ChannelKey.create(path)
