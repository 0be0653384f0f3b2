"""Teachers for distillation."""

from __future__ import annotations

from .stages.teacher import TeacherEngine, TeacherPolicy
from .stages.teachers.candidates import TeacherCandidates
from .stages.teachers.http_teacher import HttpTeacher

__all__ = ["HttpTeacher", "TeacherCandidates", "TeacherEngine", "TeacherPolicy"]
