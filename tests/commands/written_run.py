"""Folders of runs as penstock writes them, made without one: of any number of steps and samples, and of any text."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STAGES = ("SourceEnv", "RewardBridge", "AdvantageNormalizer", "Batcher", "SinkTrainer")


def metrics_of(step: int, chance: random.Random) -> dict[str, Any]:
    """Return the metrics of a step of a run that learns."""
    learned = 1 - math.exp(-step / 2_000)
    waits = {f"timing_s/{stage}/wait_input": chance.uniform(0, 0.9) for stage in STAGES[1:]}
    waits |= {f"timing_s/{stage}/wait_output": chance.uniform(0, 0.2) for stage in STAGES[:-1]}
    return {
        "step": step,
        "reward": learned + chance.gauss(0, 0.1),
        "loss": chance.gauss(0, 0.01),
        "grad_norm": chance.uniform(0.5, 1.5),
        "entropy": 3 - 2 * learned + chance.gauss(0, 0.05),
        "kl": abs(chance.gauss(0, 0.01)),
        "response_length/mean": 200 + 300 * learned + chance.gauss(0, 20),
        "staleness/mean": chance.uniform(0, 2),
        "staleness/max": 2.0,
        "perf/total_num_tokens": 32_768.0,
        "perf/time_per_step": 1.0,
        "ledger/begun": 512.0,
        "ledger/in_flight": float(chance.randint(400, 600)),
        "ledger/trained": 480.0,
        "ledger/filtered": float(chance.randint(10, 30)),
        "ledger/stale": float(chance.randint(0, 8)),
        "ended/filtered/all completions were scored alike": float(chance.randint(10, 30)),
        **({"ended/stale/older than 2 steps": float(chance.randint(1, 8))} if step % 3 else {}),
        **waits,
        **({"eval/data/reward": learned, "eval/step": float(step)} if step % 100 == 0 else {}),
        **{f"mine/{number}": chance.random() for number in range(40)},
    }


def sample(**fields: Any) -> dict[str, Any]:
    """Return a line of samples.jsonl as earlier versions wrote it, with some fields replaced."""
    return {
        "step": 1,
        "evaluated": None,
        "set": "",
        "kind": "best",
        "rank": 1,
        "env": "sums",
        "instance_id": "7",
        "repetition": 0,
        "prompt": "What is 2 + 2?",
        "completion": "It is 4.",
        "answer": "4",
        "completion_tokens": 4,
        "reward": 1.0,
        "parts": {"right": 1.0, "short": -0.5},
        "advantage": 0.5,
        "stop_reason": "stop",
        "policy_version": 0,
    } | fields


def rollout(**fields: Any) -> dict[str, Any]:
    """Return a sample of an agent: two turns with a tool between, and another sequence."""
    first, answer = "<tool_call>add(2, 2)</tool_call>", "<tool_response>4</tool_response>"
    other = {"prompt": "What is 2 + 2?", "completion": "I do not know.", "stop_reason": "length"}
    return sample(
        completion=f"{first}{answer}It is 4.",
        tokens={
            "characters": [11, 9, 12, 15, 16, 1, 2, 2, 1, 3],
            "trains": [[3, True], [3, False], [4, True]],
            "advantages": [[3, -0.25], [4, 0.75]],
            "versions": [[5, 3], [2, 4]],
            "logprobs": [-0.1, -2.5, -0.3, -0.01, -1.0, -0.2, -0.4],
            "log_ratios": [0.0, 0.3, -0.2, 0.01, 0.0, 0.0, -0.4],
        },
        branches=[{**other, "tokens": None}],
        **fields,
    )


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Append lines of JSON."""
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_run(
    folder: Path,
    *,
    steps: int = 20,
    samples: Sequence[Mapping[str, Any]] = (),
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write the folder of a run, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)  # noqa: S311 (a picture, no secret)
    write_lines(folder / "metrics.jsonl", [metrics_of(step, chance) for step in range(1, steps + 1)])
    if samples:
        write_lines(folder / "samples.jsonl", samples)
    (folder / "config.json").write_text(json.dumps(config or {"algorithm": {"optimizer": {"lr": 1e-3}}}))
    return folder


def many_samples(count: int, *, steps: int) -> list[dict[str, Any]]:
    """Return samples of a long run, ten of a step."""
    every = max(1, 10 * steps // count)
    return [
        sample(step=step, kind="best" if rank < 5 else "worst", rank=rank % 5 + 1, reward=1 - rank / 10)
        for step in range(every, steps + 1, every)
        for rank in range(10)
    ]


def write_attacked_run(folder: Path, attacks: Mapping[str, str]) -> Path:
    """Write the folder of a run with a sample, a metric, a key and a reason for each of some texts."""
    names = [text[:100] for text in attacks.values()]
    samples = [
        rollout(
            rank=rank,
            prompt=text,
            answer=text,
            env=name,
            instance_id=name,
            set=name,
            stop_reason=name,
            parts={name: 1.0},
        )
        | {"completion": text, "tokens": None, "branches": [{"prompt": text, "completion": text}]}
        for rank, (text, name) in enumerate(zip(attacks.values(), names, strict=True), 1)
    ]
    tokens = {"characters": [3, 200_000], "trains": [[2, True]], "advantages": [[2, 0.5]]}
    one_by_one = [each | {"tokens": tokens, "kind": "worst", "branches": []} for each in samples]
    run = write_run(folder, samples=[*samples, *one_by_one], config={"key": dict(zip(names, names, strict=True))})
    reasons = [f"ended/failed/{name}" for name in names]
    write_lines(
        run / "metrics.jsonl", [{"step": step} | dict.fromkeys([*names, *reasons], float(step)) for step in (21, 22)]
    )
    (run / "view.json").write_text(json.dumps(view_of(names)))
    return run


def view_of(names: Sequence[str]) -> dict[str, Any]:
    """Return the view of a run that has ended, whose stages and reasons have these names."""
    states = ("trained", "filtered", "stale", "rejected", "failed", "lost", "unfinished")
    stage = {"placement": "here", "state": "returned", "waiting_for": "", "waited_for_records_s": 0.0}
    stage |= {"waited_for_credit_s": 0.0, "dropped": {}, "workers": []}
    reasons = dict.fromkeys(names, 3)
    return {
        "written_s": 0.0,
        "shown": {
            "progress": [22, 22, 10.0, None, {}, [], []],
            "statistics": {"stages": [{"name": name, **stage} for name in names], "edges": []},
            "balance": {
                "admitted": 10 + 3 * len(names),
                "in_flight": 0,
                "ended": dict.fromkeys(states, 0) | {"trained": 10, "failed": 3 * len(names)},
                "reasons": {state: {} for state in states} | {"trained": {"": 10}, "failed": reasons},
            },
            "stop_reason": names[0],
            "memory": [0, 0, []],
        },
    }
