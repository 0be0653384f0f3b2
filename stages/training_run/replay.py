"""The configuration of a replay: that of the recorded run, with values that the training of its batches depends on.

A replay has the configuration of the last part of the run. Values that decided what was sampled are part of the
recording, so other ones are refused: they would have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from ..._pipeline.durability.recording import RECORDING
from ..._pipeline.durability.run_changes import (
    FIRST,
    STAGES,
    Change,
    StageFacts,
    changes_between,
    parts_of_run,
    plain,
    without_facts,
)
from ..._pipeline.errors import InvalidConfig, NoRecording, RunDiffers
from ..._pipeline.util.printing import print_line
from ..contracts.policies import Tokenizer
from ..senders.recording import Recording
from .config_changes import CODE
from .key_classes import class_of
from .own_rank import is_rank
from .run_config import RunConfig
from .values import load_run_config

RECORDED = (
    "data",
    "reward",
    "environment",
    *(
        f"algorithm.{name}"
        for name in (
            "advantages",
            "rewards",
            "baseline",
            "preset",
            "group_size",
            "prompts",
            "max_lag",
            "drop_zero_variance",
            "mask_truncated",
        )
    ),
    "sampling",
    "engine",
    "server",
    *(f"placement.{name}" for name in ("samplers", "servers", "ray", "joining", "python", "sampler_device")),
    "evaluation",
    "record",
)
"""The keys, and sections, whose values the recording has, or which concern samplers alone."""

SINK = "SinkTrainer"
"""The stage that states the model, in the files of a run."""

OF_THE_START = ("model.base", "critic_model.base")
"""The facts that identify the weights before the first step."""


def load_replay_config(run: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the configuration of a replay of the recorded run in `run`; its folder is `<run>-replay` by default.

    Args:
        run: folder of the run.
        overrides: `path.to.key=value` each, see `load_run_config`; `replay.last=20` ends the replay after step 20.

    Raises:
        NoRecording: the folder has no run, or one with a part that kept no batches.
        InvalidConfig: a value does not fit, or is of a key that has no effect in a replay.
        FileDamaged: a file with the configuration of the run is not as it was written.
    """
    folder = Path(run)
    parts = _recorded_parts(folder)
    values = parts[-1][1]
    recorded = load_run_config(values)
    own = {"record": False, "replay": {"run": str(run)}, "folder": f"{folder}-replay"}
    config = load_run_config(values | own, overrides)
    _refuse_others(structs.replace(recorded, record=False), config, folder)
    if not is_rank():  # the process that starts them prints it
        _print_changes(parts)
    return config


def recording_of(config: RunConfig, tokenizer: Tokenizer | None = None) -> Recording | None:
    """Return the source of a replay, with the tokenizer of its tokens; None for a run with data of its own."""
    replay = config.replay
    return None if replay is None else Recording(Path(replay.run) / RECORDING, tokenizer, replay.last)


def refuse_other_start(config: RunConfig, facts: Callable[[], StageFacts]) -> None:
    """Check that a replay begins with the weights of the recorded run, by the facts of its trainer. Blocks.

    Raises:
        RunDiffers: the model, or that of the critic, is another one.
    """
    if config.replay is None:
        return
    _, first = parts_of_run(Path(config.replay.run))[0]
    before = first.get(STAGES, {}).get(SINK, {}).get("fixed", {})
    changes = [each for each in changes_between(before, plain(facts().fixed)) if each.key.startswith(OF_THE_START)]
    if changes:
        raise RunDiffers(
            f"expected the model that the run in {config.replay.run} began with, got another one in "
            f"{config.model.path}: {'; '.join(map(str, changes))}: set model.path to the folder of the first"
        )


def _recorded_parts(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the values of each part of the run, oldest first, with the step where it begins."""
    if not (folder / FIRST).is_file():
        raise NoRecording(f"expected the folder of a recorded run, got {folder} without {FIRST}")
    parts = [(step, _values(part)) for step, part in parts_of_run(folder)]
    for step, values in parts:
        if not values.get("record"):
            raise NoRecording(
                f"expected a run with record: true in {folder}, got one that kept no batches from step {step + 1} on: "
                f"train it again with record=true in another folder"
            )
    return parts


def _values(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in without_facts(part).items() if key != CODE}


def _refuse_others(recorded: RunConfig, config: RunConfig, folder: Path) -> None:
    """Refuse values that have no effect, and the folder of the run itself."""
    if config.run_folder.absolute() == folder.absolute():
        raise InvalidConfig(f"config: folder: expected one of its own for a replay, got that of the run, {folder}")
    names = list(RECORDED) if config.algorithm.has_critic else [*RECORDED, "algorithm.gamma", "algorithm.gae_lambda"]
    if (change := next(_of(names, changes_between(plain(recorded), plain(config))), None)) is not None:
        raise InvalidConfig(
            f"config: {change.key}: expected the value of the recorded run, for another one has no effect in a replay, "
            f"got {change.now!r}: remove it, or train a run of its own"
        )


def _of(names: Iterable[str], changes: Iterable[Change]) -> Iterator[Change]:
    """Yield the changes of keys in the sections `names`."""
    sections = tuple(names)
    for change in changes:
        if any(change.key == name or change.key.startswith((f"{name}.", f"{name}[")) for name in sections):
            yield change


def _print_changes(parts: list[tuple[int, dict[str, Any]]]) -> None:
    """Print the values that the run had in earlier parts, and a replay does not have."""
    _, last = parts[-1]
    begins = [step for step, _ in parts]
    for (_, values), until in zip(parts[:-1], begins[1:], strict=True):
        changes = list(changes_between(values, last))
        recorded = set(_of(RECORDED, changes))
        for change in changes:
            if class_of(change.key) != "free" and change not in recorded:
                print_line(f"the run was trained until step {until} with another {change}; the replay has the second")
