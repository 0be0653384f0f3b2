"""Runs a script that trains with TRL on a CPU: `python on_a_cpu.py script.py`, as if it were run itself."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    import torch
    from tests.trl_real.tree_attention import flash_attn_varlen_func

    torch.set_num_threads(1)
    package = "trl.experimental.async_grpo"
    packing, trainer = (importlib.import_module(f"{package}.{name}") for name in ("packing", "async_grpo_trainer"))
    kernel = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    vars(packing)["_flash_attn"] = lambda: kernel
    vars(trainer)["get_peak_flops_per_device"] = lambda *_: None
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_path(sys.argv[1], run_name="__main__")
