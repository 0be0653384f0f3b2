"""WandB: a tracker that sends a run to Weights & Biases, or writes it for `wandb sync` (WANDB_MODE=offline)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..accounting.sample import Sample
from ..util.extras import extra
from .run_identity import identity_of
from .tracker import RunInfo


class WandB:
    """Logs metrics, samples as a table, and hyper-parameters as the configuration.

    wandb's environment variables apply: WANDB_MODE, WANDB_ENTITY, WANDB_API_KEY. A run that is continued is the same
    run there; Weights & Biases keeps the metrics of steps that it has already.

    Args:
        project: of the run; by default WANDB_PROJECT, or wandb's own default.

    Raises:
        MissingExtra: wandb is not installed.
    """

    def __init__(self, project: str | None = None) -> None:
        with extra("wandb", "WandB"):
            importlib.import_module("wandb")
        self._project = project
        self._run: Any = None

    def __repr__(self) -> str:
        return f"WandB({'' if self._project is None else repr(self._project)})"

    def start(self, run: RunInfo) -> None:
        """Begin, or continue, the run at Weights & Biases."""
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=self._project,
            name=run.name,
            dir=None if run.folder is None else str(run.folder),
            id=None if run.folder is None else identity_of(run, "wandb"),
            resume="allow" if run.step else None,
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        """Log the samples of a step as a table, and those of an evaluation as another one."""
        for name, evaluation in (("samples", False), ("eval/samples", True)):
            rows = [each.plain() for each in samples if (each.evaluated is not None) is evaluation]
            if rows:
                values = [[str(value) if isinstance(value, dict) else value for value in row.values()] for row in rows]
                table = importlib.import_module("wandb").Table(columns=list(rows[0]), data=values)
                self._run.log({name: table}, step=step)

    def close(self, ok: bool) -> None:  # noqa: FBT001 (the protocol's)
        """Finish the run."""
        self._run.finish(exit_code=0 if ok else 1)
