"""The page's files in an empty folder, with what makes them do without a network, a GPU and vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.failsafe import FAILSAFE_S
from tests.ports import free_port

__all__ = ["SEQUENCES", "STEPS", "Launched", "launched", "make_folder"]

ROOT = Path(__file__).parent.parent.parent
ATROPOS = Path(os.environ.get("ATROPOS", "")).resolve()
ATROPOS_PYTHON = ROOT / ".venv/atropos/bin/python"
VERL = ROOT / ".venv/verl"

PAGE = ROOT / "docs/atropos-verl.md"

STEPS, SEQUENCES = 3, 8

MODEL = """
from pathlib import Path
import sys
from transformers import Qwen2Config, Qwen2ForCausalLM
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
Qwen2ForCausalLM(Qwen2Config(vocab_size=300, num_key_value_heads=1, **sizes)).save_pretrained(sys.argv[1])
"""

OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def make_folder(folder: Path) -> Path:
    """Make a tiny model, and the tokenizer and data sets of tests/atropos_real by the packages of Atropos."""
    of_atropos = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    make = (
        "from pathlib import Path; from tests.atropos_real.workspace import make_workspace; make_workspace(Path('.'))"
    )
    for command, variables in (
        ([str(ATROPOS_PYTHON), "-c", make], of_atropos),
        ([sys.executable, "-c", MODEL, "model"], {}),
    ):
        subprocess.run(command, cwd=folder, env=os.environ | OFFLINE | variables, check=True)
    return folder


def page_script(steps: int) -> str:
    """Return `train.py` of the page, with smaller numbers."""
    script: str
    (script,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    sizes = "STEPS, SEQUENCES, LONGEST = 100, 64, 2048"
    assert sizes in script
    return script.replace(sizes, f"STEPS, SEQUENCES, LONGEST = {steps}, {SEQUENCES}, 2048")


def write_files(folder: Path, data: Path, steps: int) -> None:
    """Write the files of the page; commands have the page's arguments, with interpreters and paths of this machine."""
    gateway, model = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    for name in ("model", "tokenizer", "gsm8k"):
        (folder / name).symlink_to(data / name)
    server = {"base_url": f"{model}/v1", "model_name": "tokenizer", "server_type": "vllm", "api_key": "none"}
    (folder / "servers.yaml").write_text(json.dumps({"openai": [server] * 2}))
    (folder / "train.py").write_text(page_script(steps))
    of_atropos = ["env", f"PYTHONPATH={ROOT / 'src'}:{ROOT}", str(ATROPOS_PYTHON)]
    flags = {
        "slurm": "false",
        "config": "servers.yaml",
        "env.rollout_server_url": gateway,
        "env.tokenizer_name": "tokenizer",
        "env.group_size": "4",
        "env.max_token_length": "2048",
        "env.use_wandb": "false",
        "env.steps_per_eval": "0",
        "env.max_num_workers": "4",
    }
    environment = [str(ATROPOS / "environments/gsm8k_server.py"), "serve"]
    for name, value in flags.items():
        environment += [f"--{name}", value]
    scripted = ["-m", "tests.atropos_real.scripted_model", str(data / "tokenizer"), model.rpartition(":")[2]]
    config = {
        "gateway": gateway,
        "servers": {"model": {"command": [*of_atropos, *scripted], "ready": f"{model}/health"}},
        "trainer": ["env", f"PYTHONPATH={VERL}", sys.executable, "train.py"],
        "environments": {"gsm8k": [*of_atropos, *environment]},
    }
    (folder / "launch.yaml").write_text(json.dumps(config))


@dataclass
class Launched:
    """A launch of the page, and what it told."""

    process: subprocess.Popen[str]
    folder: Path
    pids: dict[str, int] = field(default_factory=dict)
    told: str = ""
    output: str = ""
    """Of the trainer."""

    def until_ready(self, name: str) -> None:
        """Read what the launcher tells until a program is ready."""
        assert self.process.stderr is not None
        while name not in self.pids:
            line = self.process.stderr.readline()
            self.told += line
            assert line, self.told
            if found := re.search(r"penstock: (\S+) is ready: pid (\d+)", line):
                self.pids[found[1]] = int(found[2])

    def until_step(self, step: int) -> None:
        """Read the trainer's output until it has made a step."""
        assert self.process.stdout is not None
        while f"step {step}: " not in self.output:
            line = self.process.stdout.readline()
            self.output += line
            assert line, self.output

    def end(self) -> int:
        """Return the exit status, when it has ended."""
        output, told = self.process.communicate(timeout=2 * FAILSAFE_S)
        self.output += output
        self.told += told
        return self.process.returncode

    def counts(self) -> tuple[int, int, int]:
        """Return the sequences that the gateway accepted, gave to the trainer, and still had."""
        line = re.search(r"(\d+) sequences accepted = (\d+) given to the trainer \+ (\d+) waiting", self.told)
        assert line, self.told
        accepted, given, waiting = map(int, line.groups())
        return accepted, given, waiting


@contextmanager
def launched(folder: Path, data: Path, steps: int = STEPS) -> Iterator[Launched]:
    """Type the command of the page in a folder with its files; kill the launcher after the body, if it still runs."""
    write_files(folder, data, steps)
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "launch", "launch.yaml"],
        cwd=folder,
        env=os.environ | OFFLINE,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Launched(process, folder)
        finally:
            process.kill()
