"""Teachers for distillation."""

from __future__ import annotations

from ._stages.contracts.candidates import TeacherCandidates
from ._stages.teachers.http_teacher import HttpTeacher
from ._stages.teachers.teacher import TeacherEngine, TeacherPolicy

__all__ = ["HttpTeacher", "TeacherCandidates", "TeacherEngine", "TeacherPolicy"]
