"""The gateway's queue as Prometheus reads them. Sans-I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..queue.records import EnvStatistics, Status

__all__ = ["exposition"]

OF_ENVIRONMENTS = (
    ("submitted_sequences_total", "counter", "Sequences that were accepted.", "submitted"),
    ("taken_sequences_total", "counter", "Sequences that were handed out.", "taken"),
    ("rejected_submissions_total", "counter", "Submissions for which there was no room.", "rejected"),
    ("queued_sequences", "gauge", "Sequences that wait.", "queued"),
    ("buffered_sequences", "gauge", "Sequences that wait for others to make up whole groups.", "buffered"),
    ("silent_seconds", "gauge", "How long nothing was heard of it.", "silent_s"),
    ("connected", "gauge", "Whether it has not said goodbye.", "connected"),
)
"""Name, type, description, and the attribute of `EnvStatistics`."""

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def exposition(status: Status, environments: Sequence[EnvStatistics], stuck: Sequence[str]) -> str:
    """Everything as text, environment by environment."""
    lines = [
        *_metric("step", "gauge", "The trainer's step.", [("", status.current_step)]),
        *_metric("queued_groups", "gauge", "Groups that wait.", [("", status.queue_size)]),
        *_metric("stuck_reasons", "gauge", "Why something does not move; the log says each.", [("", len(stuck))]),
    ]
    labels = [f'{{env="{each.name.translate(_ESCAPES)}",env_id="{each.env_id}"}}' for each in environments]
    for name, kind, description, attribute in OF_ENVIRONMENTS:
        values = [getattr(each, attribute) for each in environments]
        lines += _metric(f"env_{name}", kind, description, zip(labels, values, strict=True))
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, description: str, values: Iterable[tuple[str, float]]) -> list[str]:
    full = f"penstock_gateway_{name}"
    head = [f"# HELP {full} {description}", f"# TYPE {full} {kind}"]
    return head + [f"{full}{labels} {float(value):g}" for labels, value in values]
