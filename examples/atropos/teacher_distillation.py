r"""Run Atropos' GSM8k environment with a teacher; at its last commit it does not start without this file.

    PYTHONPATH=atropos python examples/atropos/teacher_distillation.py serve --config servers.yaml \
        --teacher.base_url http://127.0.0.1:9003/v1 --teacher.model_name my-teacher --teacher.api_key none \
        --env.teacher_top_k 4

`serve` passes the teachers to the constructor, and `GSM8kEnv.__init__`, which is called first, has no such parameter.
"""

from typing import Any

from atroposlib.envs.teacher_distillation_env import (  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
    TeacherDistillationEnv,
)
from environments.gsm8k_server_teacher_distill import (  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
    GSM8kTeacherDistillEnv,
)


class TaughtGSM8kEnv(GSM8kTeacherDistillEnv):  # type: ignore[misc]
    """GSM8kTeacherDistillEnv with a constructor that works."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        TeacherDistillationEnv.__init__(self, *arguments, **options)
        self.percent_correct_buffer: list[float] = []
        self.eval_metrics: list[tuple[str, float]] = []


if __name__ == "__main__":
    TaughtGSM8kEnv.cli()
