"""Trackio: a tracker that writes a run into the local database of trackio, for `trackio show`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..accounting.sample import Sample
from ..util.extras import extra
from .run_identity import identity_of
from .tensorboard import flat
from .tracker import RunInfo


class Trackio:
    """Logs metrics, samples as a table, and hyper-parameters with trackio, which keeps them on this host.

    Its environment variables apply: TRACKIO_DIR is the folder of its databases. A run that is continued is the same run
    there; the metrics of steps that it has already are kept. trackio prints a few lines on stdout.

    Args:
        project: of the run.

    Raises:
        MissingExtra: trackio is not installed.
    """

    def __init__(self, project: str = "penstock") -> None:
        with extra("trackio", "Trackio"):
            importlib.import_module("trackio")
        self._project = project
        self._run: Any = None
        self._known_until = 0
        """The last step that trackio has already."""

    def __repr__(self) -> str:
        return f"Trackio({self._project!r})"

    def start(self, run: RunInfo) -> None:
        """Begin, or continue, the run."""
        name = f"{run.name}-{identity_of(run, 'trackio')}"
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        if run.step:
            self._known_until = storage.get_max_step_for_run(self._project, name) or 0
        self._run = importlib.import_module("trackio").init(
            project=self._project,
            name=name,
            config=dict(flat(run.config)),
            resume="allow" if run.step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""
        if step > self._known_until:
            self._run.log(dict(metrics), step=step)

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        """Log the samples of a step as text, a line of JSON each."""
        if samples and step > self._known_until:
            text = "\n".join(msgspec.json.encode(sample).decode() for sample in samples)
            self._run.log({"samples": importlib.import_module("trackio").Markdown(f"```\n{text}\n```")}, step=step)

    def close(self, ok: bool) -> None:  # noqa: ARG002, FBT001 (the protocol's)
        """Finish the run."""
        self._run.finish()
