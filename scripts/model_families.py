"""Write the table of families in docs/models.md: every causal model of transformers, tiny, compared with transformers.

python scripts/model_families.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import transformers
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.models_hf import families


def main() -> None:
    """Compare the families one by one, and write those that compute the same."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    lines = list[str]()
    for family in track([*families.families()]):
        try:
            lines.append(_line(family))
        except Exception as error:  # noqa: BLE001 (a family that is not made or not computed is left out, with the reason)
            sys.stderr.write(f"{family}: left out: {' '.join(str(error).split())[:200]}\n")
    families.write_table(lines)


def _line(family: str) -> str:
    """Return the line of a family in the table.

    Raises:
        ValueError: its differences are no rounding.
    """
    with tempfile.TemporaryDirectory() as folder:
        module = families.made(family)
        module.save_pretrained(folder)
        found = families.differences(Path(folder))
    if not found.within():
        raise ValueError(f"{found}")
    rows = "several sequences" if found.packs else "one sequence"
    shares = " | ".join(f"{each:.0e}" for each in (found.rows, found.gradients, found.cached))
    return f"| `{family}` | {type(module).__name__} | {rows} | {shares} |"


if __name__ == "__main__":
    main()
