"""TensorBoard: a tracker that writes event files. tensorboardX writes them: TensorBoard itself is not needed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..accounting.sample import Sample
from ..util.extras import extra
from .tracker import RunInfo


class TensorBoard:
    """Writes metrics as scalars, samples as text, and hyper-parameters for the tab HPARAMS, as event files.

    The steps that a continued run trains again are first removed from the display.

    Args:
        folder: of the files; by default `tensorboard` in the folder of the run.

    Raises:
        MissingExtra: tensorboardX is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        with extra("tensorboard", "TensorBoard"):
            importlib.import_module("tensorboardX")
        self._given = None if folder is None else Path(folder)
        self._writer: Any = None

    def __repr__(self) -> str:
        return f"TensorBoard({'' if self._given is None else repr(str(self._given))})"

    def start(self, run: RunInfo) -> None:
        """Open an event file, and write the hyper-parameters."""
        folder = self._given or (run.folder or Path(run.name)) / "tensorboard"
        module = importlib.import_module("tensorboardX")
        purge_step = run.step + 1 if run.step else None
        self._writer = module.SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=f".{run.step:08d}")
        if run.config:
            summary = importlib.import_module("tensorboardX.summary")
            for part in summary.hparams(dict(flat(run.config)), {}):
                self._writer.file_writer.add_summary(part)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        """Write each sample as text."""
        for sample in samples:
            text = msgspec.json.format(msgspec.json.encode(sample.plain()), indent=2).decode()
            indented = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown shows it as it is
            tag = "samples" if sample.evaluated is None else "eval/samples"
            self._writer.add_text(f"{tag}/{sample.kind}_{sample.rank}", indented, step)
        self._writer.flush()

    def close(self, ok: bool) -> None:  # noqa: ARG002, FBT001 (the protocol's)
        """Close the file."""
        self._writer.close()


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield every value of a configuration with its path: `algorithm.optimizer.lr`; what is no number as text."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, bool | int | float | str) else repr(value)
