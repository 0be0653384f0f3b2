"""A JSON object in a file that another program wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..._pipeline.errors import InvalidConfig
from ..._schemas.conversion import decode_json


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file at `path`. Blocks.

    Raises:
        InvalidConfig: the file has no JSON object.
    """
    try:
        return decode_json(path.read_bytes(), dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: expected a JSON object, got {error}: save it again") from error
