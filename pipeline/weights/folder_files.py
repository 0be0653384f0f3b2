"""The files in a folder of published weights, and the records in them.

lock                                   held by the publisher while it lives
publisher.json                         `Owner`
step-00000007/version.json             `Version`
step-00000007/weights.safetensors      the whole version
step-00000007/changes.delta            its changes since the version before (`folder_delta`)
step-00000007/manifest.json            sizes and hashes of these files
"""

from __future__ import annotations

import msgspec

from .folder_delta import ChangedSpan
from .weights import NO_VERSION

LOCK = "lock"
OWNER = "publisher.json"
VERSION = "version.json"
WEIGHTS = "weights.safetensors"
CHANGES = "changes.delta"


class Owner(msgspec.Struct, frozen=True):
    """The publisher of a folder."""

    name: str
    generation: int
    """Drawn when the folder was taken; versions with another one are another publisher's."""
    header: msgspec.Raw
    """The header of each version's file."""
    closed: bool = False
    """True if it closed, so that no newer version follows."""


class Version(msgspec.Struct, frozen=True):
    """A version, in a file beside its weights."""

    version: int
    generation: int
    """That of its publisher."""
    base: int = NO_VERSION
    """The version that `spans` follow from."""
    spans: tuple[ChangedSpan, ...] = ()
    """Those of the changes; none without a file of changes."""
