"""An agent that blocks; of a module of its own, because its process imports it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock._stages.contracts.rollouts import RolloutFiltered
from penstock.agents import BlockingAgentClient, Outcome

ASKED = [{"role": "user", "content": "2+2?"}]
AGAIN = {"role": "user", "content": "Sure?"}


@dataclass
class Blocks:
    """An agent whose code blocks."""

    says: str = ""
    leaves: str = ""
    """The file for the id of a process that it leaves."""

    def drive(self, task: int, client: BlockingAgentClient) -> Any:
        print(f"task {task}")  # noqa: T201 (as agents do; it must not disturb the process)
        said: list[Any] = list(ASKED)
        said.append(client.chat(said))
        said.append(AGAIN)
        said.append(client.chat(said, temperature=0.5))
        if self.says == "raises":
            raise ZeroDivisionError("no agent")
        if self.says == "filters":
            raise RolloutFiltered("no tool was called")
        if self.says == "is killed" and client.repetition == 0:
            left = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # noqa: S607 (of any path)
            Path(self.leaves).write_text(str(left.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        if self.says == "hangs":
            time.sleep(3600)
        if self.says == "generates":
            return float(client.generate([1, 2, 3], max_tokens=2)["finish_reason"] == "stop")
        if self.says == "debates":
            other = client.another()
            other.chat(said[:-1])
            other.reward(-0.5)
            client.reward(1.0)
            return None
        if self.says == "rewards":
            client.reward(2.0)
            return None
        return float("nan") if self.says == "nan" else Outcome(reward=1.0, parts={"style": 0.5})
