"""Teachers for distillation."""

from __future__ import annotations

from ._stages.teacher import TeacherEngine, TeacherPolicy
from ._stages.teachers.candidates import TeacherCandidates
from ._stages.teachers.http_teacher import HttpTeacher

__all__ = ["HttpTeacher", "TeacherCandidates", "TeacherEngine", "TeacherPolicy"]
