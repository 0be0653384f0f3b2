"""The weights of SkyRL's policy, as its workers write them: a folder of transformers (`save_hf_model`).

SkyRL has no other interface that gives whole weights to a foreign engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...._pipeline.errors import WeightsDamaged
from ...._pipeline.util.extras import extra


@contextmanager
def written(dispatch: Any, tokenizer: Any, folder: Path) -> Iterator[dict[str, Any]]:
    """Have the workers of `dispatch` write the model into `folder`, yield its tensors by name, and remove the folder.

    Raises:
        WeightsDamaged: the files that they wrote cannot be read.
    """
    dispatch.save_hf_model("policy", str(folder), tokenizer)
    try:
        yield _tensors_in(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tensors_in(folder: Path) -> dict[str, Any]:
    with extra("torch", "PenstockGenerator(publisher=…)"):
        from ...models.torch_weights_file import read_folder  # noqa: PLC0415 (only where weights are published)
    tensors = read_folder(folder)
    if not tensors:
        raise WeightsDamaged(f"expected safetensors of SkyRL's policy in {folder}, got {sorted(folder.glob('*'))}")
    return tensors
