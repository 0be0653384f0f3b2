"""Loggers of structured events, for every module of penstock."""

from __future__ import annotations

import logging
from typing import Any

import structlog


def get_logger(name: str) -> Any:
    """Return a structlog logger, for events with fields: `log.info("worker_started", worker=0, pid=…)`.

    Where structlog is not configured, events go to the standard library's logger `name`, so that a script that
    configures neither has warnings on stderr and no output on stdout.
    """
    return _Logger(name)


class _Logger:
    """A logger that chooses its backend at every event: a script may configure structlog after it imported penstock."""

    def __init__(self, name: str) -> None:
        self._configured = structlog.get_logger(name)
        self._standard = structlog.wrap_logger(
            logging.getLogger(name),
            processors=[structlog.stdlib.filter_by_level, _as_standard],
            wrapper_class=structlog.stdlib.BoundLogger,
            context_class=dict,
        )

    def __getattr__(self, method: str) -> Any:
        return getattr(self._configured if structlog.is_configured() else self._standard, method)


def _as_standard(_: Any, __: str, fields: structlog.typing.EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """Return an event as the arguments of a standard logger: `worker_started worker=0 pid=…`."""
    passed_on = {name: fields.pop(name) for name in ("exc_info", "stack_info") if name in fields}
    event = fields.pop("event")
    return (" ".join([event, *(f"{name}={value!r}" for name, value in fields.items())]),), passed_on
