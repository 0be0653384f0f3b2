"""The placement of a stage: `here()`, in `processes(n)`, on `ray(workers=n)`, or in workers that join, `joining(n)`.

Placement belongs to the edge, not to the stage: the same stage runs alone in a test, here, and in four processes.
"""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from ..._schemas.choices import check_choice
from ..._schemas.config import Config
from ..._schemas.errors import InvalidConfig
from ..._schemas.numbers import normalize_counts, normalize_numbers
from ..weights.weight_address import WeightAddress

STOP_TIMEOUT_S = 3.0
"""Seconds between SIGTERM and SIGKILL of a worker: a run that is interrupted ends within five seconds."""

START_TIMEOUT_S = 60.0
"""Seconds that a worker may take to import its stage and to connect."""

PLACEMENT_TIMEOUT_S = 60.0
"""Seconds that a cluster may take to reserve what the workers of a stage need."""


@dataclass(frozen=True, slots=True)
class Here:
    """The placement in the event loop that runs the pipeline."""

    def __str__(self) -> str:
        return "here"


@dataclass(frozen=True, slots=True)
class Processes:
    """Place a stage in `count` processes. It is pickled to each, so it must open files and models in its `run`.

    A worker that dies (a signal, `os._exit`) is restarted up to `restarts` times within an hour; prompts that it held
    are assigned again, and records that were sent to it are counted as lost. An exception in a worker ends the pipeline
    as it would here. A worker whose stage has not begun after `start_timeout_s` is killed, and counts as one that died.

    With `python`, workers run in another interpreter, with its packages: those of an environment may exclude those of
    the trainer. It needs this version of penstock, and what the stage imports; modules of the current folder are found.

    >>> processes(4, restarts=2)
    Processes(count=4, restarts=2, stop_timeout_s=3.0, start_timeout_s=60.0, python=None)

    Raises:
        InvalidConfig: fewer than one process, restarts that are no whole number or negative, seconds that are not
            finite or negative, or no time to start.
    """

    count: int
    """Workers, each in one process."""
    _: KW_ONLY
    restarts: int = 1
    """Times that each worker is restarted after it died, within an hour, before the run fails."""
    stop_timeout_s: float = STOP_TIMEOUT_S
    """Seconds between SIGTERM and SIGKILL when a worker is stopped."""
    start_timeout_s: float = START_TIMEOUT_S
    """Seconds from the start of a worker's process until its stage begins; one that takes longer is killed."""
    python: str | None = None
    """Interpreter of the workers; by default that of this process. `PYTHONPATH` is not passed to another one."""

    def __post_init__(self) -> None:
        normalize_counts(self, "count")
        normalize_counts(self, "restarts", least=0)
        normalize_numbers(self, "stop_timeout_s", zero=True)
        normalize_numbers(self, "start_timeout_s")
        if self.python is not None and not (isinstance(self.python, str) and self.python):
            raise InvalidConfig(f"Processes.python: expected the path of an interpreter, got {self.python!r}")

    def __str__(self) -> str:
        processes = "1 process" if self.count == 1 else f"{self.count} processes"
        return f"{processes}{f' of {self.python}' if self.python else ''}, {_restarts(self.restarts)}"


def _restarts(restarts: int) -> str:
    if not restarts:
        return "no restarts"
    return f"at most {restarts} restart{'s' if restarts > 1 else ''} an hour each"


Strategy: TypeAlias = Literal["PACK", "SPREAD"]
"""PACK: on as few nodes as possible · SPREAD: on as many as possible."""


class RayActors(Config, frozen=True, kw_only=True):
    """The actors of Ray that run a stage: their resources and their cluster.

    Raises:
        InvalidConfig: a number that is not finite or negative, or another strategy.
    """

    num_cpus: float = 1
    """CPUs that each actor reserves."""
    num_gpus: float = 0
    """GPUs that each actor reserves."""
    resources: dict[str, Annotated[float, Meta(gt=0, le=sys.float_info.max)]] = msgspec.field(default_factory=dict)
    """Custom resources that each actor reserves."""
    strategy: Strategy = "SPREAD"
    address: str = "auto"
    """The cluster: `auto` for the one that runs already, HOST:PORT, or `local` for one that is started for the run."""
    runtime_env: dict[str, Any] = msgspec.field(default_factory=dict)
    """Ray's runtime environment of the actors."""
    placement_timeout_s: float = PLACEMENT_TIMEOUT_S
    """Seconds after which workers that do not fit into the cluster end the run."""

    def __post_init__(self) -> None:
        normalize_numbers(self, "num_cpus", "num_gpus", zero=True)
        normalize_numbers(self, "placement_timeout_s")
        if not self.address or self.address.startswith("ray://"):
            raise InvalidConfig(
                f"address: expected auto, local or HOST:PORT, got {self.address!r}: actors send to the pipeline; run "
                f"it on a node of the cluster, or as a job (ray job submit)"
            )
        check_choice("strategy", self.strategy, Strategy)

    @property
    def bundle(self) -> dict[str, float]:
        """The resources that each actor reserves, by Ray's names; those that are 0 are left out."""
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in asked.items() if amount}


class Ray(RayActors, frozen=True, kw_only=False):
    """Place a stage in `workers` actors of Ray. Ray pickles it to each, so it opens files and models in its `run`.

    Records travel over shared memory to actors on this host, and over tcp, encrypted with a key of the run, to those on
    other hosts. A worker whose actor or node dies is restarted, on another node if need be, up to `restarts` times
    within an hour; prompts that it held are assigned again. The run uses a cluster that exists: `address="auto"` finds
    that of this host or of `RAY_ADDRESS`, `"local"` starts one for the run.

    >>> ray(workers=2, num_gpus=1).bundle
    {'CPU': 1, 'GPU': 1}

    Raises:
        InvalidConfig: fewer than one worker, restarts that are no whole number or negative, or no time to start; see
            `RayActors` too.
    """

    workers: int
    """Actors."""
    restarts: int = 1
    """Times that each worker is restarted after it died, within an hour, before the run fails."""
    stop_timeout_s: float = STOP_TIMEOUT_S
    """Seconds that a worker has to stop before its actor is killed."""
    start_timeout_s: float = START_TIMEOUT_S
    """Seconds from the creation of an actor until its stage begins; one that takes longer is killed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        normalize_counts(self, "workers")
        normalize_counts(self, "restarts", least=0)
        normalize_numbers(self, "stop_timeout_s", zero=True)
        normalize_numbers(self, "start_timeout_s")

    def __str__(self) -> str:
        actors = "1 actor" if self.count == 1 else f"{self.count} actors"
        each = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items()) or "nothing"
        return f"{actors} of Ray, {self.strategy}, each reserves {each}, {_restarts(self.restarts)}"

    @property
    def count(self) -> int:
        """The number of workers."""
        return self.workers


JOIN_URL = "tcp://0.0.0.0:5555"

ABSENCE_TIMEOUT_S = 600.0
"""Seconds without any worker after which a run on `joining()` ends: finding a machine takes less."""


class JoinedAt(Config, frozen=True, kw_only=True):
    """The address that workers join.

    Raises:
        InvalidConfig: seconds that are not finite or negative, or a URL of another kind.
    """

    url: str = JOIN_URL
    """Address at which to listen for them; by default port 5555 of every address."""
    key: str = ""
    """Path of the key file, which is created if it does not exist; the workers need a copy. By default this user's key,
    which the workers have too where the home folder is shared."""
    absence_timeout_s: float = ABSENCE_TIMEOUT_S
    """Seconds without any worker after which the run ends."""

    def __post_init__(self) -> None:
        normalize_numbers(self, "absence_timeout_s")
        if not self.url.startswith("tcp://"):
            raise InvalidConfig(f"url: expected tcp://HOST:PORT, got {self.url!r}")


class Joining(JoinedAt, frozen=True, kw_only=False):
    """Place a stage in workers that are started on other hosts, by `penstock worker --join URL --key FILE …`.

    They may join, leave and come back while the run goes on. Each makes the stage of the configuration, or of the
    script, on its own host; it must be equal to that of the pipeline. `SourceEnv` assigns prompts to its workers, so
    there can be any number of them. Another source is shared by `expected` workers: more wait until one leaves. A
    worker that dies is not restarted from here; the others get the prompts that it held.

    >>> str(joining(expected=4))
    'workers that join at tcp://0.0.0.0:5555, 4 expected'

    Raises:
        InvalidConfig: fewer than one worker, or seconds that are negative; see `JoinedAt` too.
    """

    expected: int
    """Workers that share the work of a source that cannot assign them prompts; more wait for a place."""
    weights: WeightAddress | None = None
    """The address that `publisher.serve(…)` yields, if they sample with published weights. Workers must reach its port
    too, at the host of the URL that they join."""
    digest: str = ""
    """The digest of their configuration or script; by default that of the running script."""
    stop_timeout_s: float = STOP_TIMEOUT_S
    """Seconds that a worker has to stop before its connection is closed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        normalize_counts(self, "expected")
        normalize_numbers(self, "stop_timeout_s", zero=True)

    def __str__(self) -> str:
        return f"workers that join at {self.url}, {self.expected} expected"

    @property
    def count(self) -> int:
        """The number of workers that share the work."""
        return self.expected

    @property
    def restarts(self) -> int:
        """No restarts from here: a worker may leave and come back as often as it likes."""
        return 0

    @property
    def start_timeout_s(self) -> float:
        """Seconds that a worker that has joined may take until its stage begins; it may load a model before."""
        return self.absence_timeout_s


Remote: TypeAlias = Processes | Ray | Joining
"""A placement in workers with copies of the stage."""

Placement: TypeAlias = Here | Processes | Ray | Joining

HERE = Here()
"""The default."""


def here() -> Here:
    """Place a stage in the event loop that runs the pipeline."""
    return HERE


processes = Processes
ray = Ray
joining = Joining
