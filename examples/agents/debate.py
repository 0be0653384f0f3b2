"""Two debaters in one rollout: the first names the larger of two digits, the second hears it, and agrees or objects.

    cd examples/agents && penstock run debate.yaml

Each has a client of its own: a key, a conversation and a reward. A rollout has both sequences, and the sum of rewards.
"""

from __future__ import annotations

from random import Random
from typing import Any

from penstock.agents import AgentClient, Outcome


def rows() -> list[dict[str, Any]]:
    """Return every pair of different digits."""
    return [{"question": f"{a}{b}", "larger": str(max(a, b))} for a in "0123456789" for b in "0123456789" if a != b]


WARM_UP_STEPS = 300


def transcript(row: dict[str, Any], rng: Random) -> list[tuple[str, str]]:
    """Return a conversation of the warm-up: a claim, or a verdict, each by chance."""
    question, claim = row["question"], rng.choice(row["question"])
    if rng.choice([True, False]):
        return [("user", f"larger {question}"), ("assistant", claim)]
    return [("user", question), ("user", f"right {claim}"), ("assistant", rng.choice("yn"))]


async def debate(row: dict[str, Any], client: AgentClient) -> Outcome:
    """Let one claim, and the other judge the claim."""
    other = client.another()
    claim = (await client.chat([{"role": "user", "content": f"larger {row['question']}"}]))["content"]
    heard = [{"role": "user", "content": row["question"]}, {"role": "user", "content": f"right {claim}"}]
    verdict = (await other.chat(heard))["content"]
    right = claim == row["larger"]
    judged = verdict == ("y" if right else "n")
    await client.reward(right / 2)
    await other.reward(judged / 2)
    return Outcome(metrics={"right": float(right), "judged": float(judged), "agreed": float(verdict == "y")})
