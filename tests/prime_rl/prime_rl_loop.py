"""prime-rl's training loop on a CPU, for one data-parallel rank: its data loader, its loss, its files.

    RANK=0 WORLD_SIZE=1 python -m tests.prime_rl.prime_rl_loop MODEL CONFIG STEPS [RESUMED_AT]

In the order of src/prime_rl/trainer/rl/train.py, whose own loop needs CUDA. The model is transformers' own; with
several ranks gradients are added up by gloo. CONFIG is its TrainerConfig in JSON; a copy of every micro-batch is kept
in <output_dir>/received.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def module(name: str) -> Any:
    return importlib.import_module(f"prime_rl.{name}")


def write_weights(model: Any, output: Path, step: int) -> None:
    """Write the files of FileSystemWeightBroadcast, whose module needs torchtitan."""
    folder = module("utils.pathing").get_step_path(module("utils.pathing").get_broadcast_dir(output), step)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors")
    (folder / "STABLE").touch()


def main(folder: Path, settings: dict[str, Any], steps: int, resumed_at: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    losses = module("trainer.rl.loss")
    config = module("configs.trainer").TrainerConfig(**settings)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    output = Path(config.output_dir)
    output.mkdir(exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{output.resolve()}/ranks", rank=rank, world_size=ranks)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    if resumed_at:
        path = module("utils.pathing").get_broadcast_dir(output) / f"step_{resumed_at}" / "model.safetensors"
        model.load_state_dict(importlib.import_module("safetensors.torch").load_file(path), strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, weight_decay=0)
    loss_of = losses.setup_rl_loss_fn(config.loss)
    loader = module("trainer.rl.data").DataLoader(output, resumed_at + 1, ranks, config.rollout_transport)
    if rank == 0:
        write_weights(model, output, resumed_at)
    for step in range(resumed_at + 1, steps + 1):
        loader.wait_for_batch()
        parts = loader.get_batch()
        keep(output / "received", step, rank, parts)
        scale = summed(torch.tensor(sum(int(part["loss_mask"].sum()) for part in parts)))
        for part in parts:
            torch.autograd.backward(loss_on(model, part, loss_of, losses, max(int(scale), 1)))
        for parameter in model.parameters():
            summed(parameter.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            write_weights(model, output, step)
    dist.destroy_process_group()


def summed(tensor: Any) -> Any:
    """Return a tensor after adding those of all ranks to it."""
    dist.all_reduce(tensor)
    return tensor


def loss_on(model: Any, part: Any, loss_of: Any, losses: Any, scale: int) -> Any:
    """Return prime-rl's loss of a micro-batch. Sequences of a row attend to themselves alone by a mask of blocks."""
    lengths = part["seq_lens"]
    places = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    alone = (places[:, None] == places[None]) & torch.ones(len(places), len(places)).tril().bool()
    mask = torch.zeros(alone.shape).masked_fill(~alone, torch.finfo(torch.float32).min)[None, None]
    tokens = part["input_ids"]
    logits = model(input_ids=tokens, position_ids=part["position_ids"], attention_mask=mask).logits
    scaled = logits / part["temperatures"].unsqueeze(-1)
    logprobs = losses.selective_log_softmax(scaled, losses.shift_tensor_left(tokens))
    split = list(part["sequence_lengths"])
    loss, _ = losses.compute_loss(
        trainer_logprobs=losses.shift_tensor_right(logprobs).squeeze(0).split(split),
        inference_logprobs=part["inference_logprobs"].squeeze(0).split(split),
        ref_logprobs=None,
        advantages=part["advantages"].squeeze(0).split(split),
        loss_mask=part["loss_mask"].squeeze(0).split(split),
        rl_weights=None,
        ce_weights=None,
        ref_kl_weights=None,
        rl_loss_fn=loss_of,
        rl_scale=scale,
        ce_scale=1,
        ref_kl_scale=1,
    )
    return loss


def keep(folder: Path, step: int, rank: int, parts: Any) -> None:
    """Write what the loader made of micro-batches, as lists."""
    folder.mkdir(exist_ok=True)
    lists = [
        {name: value.squeeze(0).tolist() if isinstance(value, torch.Tensor) else value for name, value in part.items()}
        for part in parts
    ]
    (folder / f"{step}-{rank}.json").write_bytes(msgspec.json.encode(lists))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0)
