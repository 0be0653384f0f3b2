"""MLflow: a tracker that writes a run into a database of MLflow, by default one in the run's folder."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..accounting.sample import Sample
from ..util.extras import extra
from .run_identity import identity_of
from .tensorboard import flat
from .tracker import RunInfo

MOST_AT_ONCE = 1000
"""Metrics of a batch that MLflow takes; of parameters 100."""

MOST_PARAMETERS, LONGEST_PARAMETER = 100, 6000

ALWAYS = "perf/time_per_step"
"""A metric that every step has: its last step is the last one that MLflow has."""

IDENTITY = "penstock.id"

SQLITE = "sqlite:///"


class MLflow:
    """Logs metrics, samples and hyper-parameters with MLflow's client.

    A run that is continued is the same run there; the metrics of steps that it has already are kept. MLflow allows no
    `@` in names: `mean@8` is `mean_8` there.

    Args:
        uri: of the store; by default MLFLOW_TRACKING_URI, or the database `mlflow.db` in the folder of the run.
        experiment: its name; it is made where there is none.

    Raises:
        MissingExtra: mlflow-skinny, sqlalchemy or alembic is not installed.
    """

    def __init__(self, uri: str | None = None, experiment: str = "penstock") -> None:
        with extra("mlflow", "MLflow"):
            for module in ("mlflow.tracking", "sqlalchemy", "alembic"):
                importlib.import_module(module)
        self._uri, self._experiment = uri, experiment
        self._client: Any = None
        self._id = ""
        self._known_until = 0
        """The last step that MLflow has already."""

    def __repr__(self) -> str:
        return f"MLflow({'' if self._uri is None else repr(self._uri)})"

    def start(self, run: RunInfo) -> None:
        """Begin, or continue, the run."""
        folder = (run.folder or Path(run.name)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{folder / 'mlflow.db'}"
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else self._new_experiment(uri)
        identity = identity_of(run, "mlflow")
        found = self._client.search_runs([experiment], f"tags.`{IDENTITY}` = '{identity}'") if run.step else []
        if found:
            self._id = found[0].info.run_id
            self._known_until = max((each.step for each in self._history(ALWAYS)), default=0)
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment, run_name=run.name, tags={IDENTITY: identity}).info.run_id
        self._log_parameters(run.config)

    def _new_experiment(self, uri: str) -> str:
        """Make the experiment; the files of its runs are beside a database, and not in the current folder."""
        path = uri.removeprefix(SQLITE)
        files = None if path == uri else (Path(path).absolute().parent / "mlflow-files").as_uri()
        made: str = self._client.create_experiment(self._experiment, artifact_location=files)
        return made

    def _history(self, name: str) -> Sequence[Any]:
        history: Sequence[Any] = self._client.get_metric_history(self._id, name)
        return history

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        make = importlib.import_module("mlflow.entities").Param
        values = [make(_name(key), str(value)[:LONGEST_PARAMETER]) for key, value in flat(config)]
        for first in range(0, len(values), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=values[first : first + MOST_PARAMETERS])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""
        if step <= self._known_until:
            return
        make, now = importlib.import_module("mlflow.entities").Metric, int(time.time() * 1000)
        values = [make(_name(name), float(value), now, step) for name, value in metrics.items()]
        for first in range(0, len(values), MOST_AT_ONCE):
            self._client.log_batch(self._id, metrics=values[first : first + MOST_AT_ONCE])

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        """Write the samples of a step as a file of the run, with a line of JSON each."""
        if samples and step > self._known_until:
            text = "".join(msgspec.json.encode(sample).decode() + "\n" for sample in samples)
            self._client.log_text(self._id, text, f"samples/step-{step:08d}.jsonl")

    def close(self, ok: bool) -> None:  # noqa: FBT001 (the protocol's)
        """Finish the run."""
        self._client.set_terminated(self._id, "FINISHED" if ok else "FAILED")


def _name(name: str) -> str:
    """Return a name that MLflow allows.

    >>> _name("eval/gsm8k/mean@8")
    'eval/gsm8k/mean_8'
    """
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
