"""PrimeRLSink: the end of a pipeline that prime-rl trains on."""

from __future__ import annotations

from pathlib import Path

from ...sink.sink_trainer import SinkTrainer, WeightSink
from .trainer import STEP_TIMEOUT_S, PrimeRLTrainer


def PrimeRLSink(  # noqa: N802 (makes a stage)
    to: str | Path,
    ranks: int,
    *,
    seq_len: int,
    publisher: WeightSink | None = None,
    output: str | Path | None = None,
    temperature: float = 1.0,
    max_steps: int | None = None,
    checkpoint_every: int | None = None,
    step_timeout_s: float = STEP_TIMEOUT_S,
) -> SinkTrainer:
    """Return a sink for a trainer of prime-rl that runs beside it.

    A batch is committed when the weights that prime-rl made of it are written. A `SinkTrainer` with a `PrimeRLTrainer`
    has more options.

    Args:
        to: prime-rl's `output_dir`, for `rollout_transport.type = "filesystem"`; or `tcp://host:port`, for "zmq".
        ranks: data-parallel ranks of its trainer.
        seq_len: its `model.seq_len`: tokens of a micro-batch.
        publisher: receives the weights of every step, for the samplers.
        output: its `output_dir`, with a URL.
        temperature: temperature of the sampling; its trainer divides the logits by it.
        max_steps: its `max_steps`; the run ends when this optimizer step is done.
        checkpoint_every: its `ckpt.interval`, so that both can resume from the same step.
        step_timeout_s: bound on one of its steps, and on the start of its trainer.

    Raises:
        InvalidConfig: a URL without `output`, or a number out of range.
    """
    trainer = PrimeRLTrainer(
        to, ranks, seq_len=seq_len, output=output, temperature=temperature, step_timeout_s=step_timeout_s
    )
    return SinkTrainer(trainer, publisher, max_steps=max_steps, checkpoint_every=checkpoint_every)
