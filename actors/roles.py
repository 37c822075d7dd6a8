"""Which weights play which role in a run; torch-free."""

from __future__ import annotations

from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import (
    BackboneTeacherConfig,
    HFModelConfig,
    HFStudentConfig,
    TeacherConfig,
)
from miniverl_dist.schemas.roles import RoleGraph, RolePlace


def role_graph(config: RunConfig) -> RoleGraph:
    """Actor, teacher and reference of a run with the weights of each."""
    model, reference = config.student.model, None
    has_reference = config.loss.kl_coef > 0
    if isinstance(model, HFStudentConfig) and model.lora is not None:
        backbone = f"student {model.path.name}"
        actor = RolePlace(backbone=backbone, adapter="actor", is_trained=True)
        if has_reference:
            reference = RolePlace(backbone=backbone, adapter="reference")
    else:
        name = model.path.name if isinstance(model, HFStudentConfig) else model.kind
        actor = RolePlace(backbone=f"student {name}", is_trained=True)
        if has_reference:
            reference = RolePlace(backbone=f"frozen copy of student {name}")
    teacher = None if config.teacher is None else _teacher(config.teacher, actor)
    return RoleGraph(actor=actor, teacher=teacher, reference=reference)


def _teacher(teacher: TeacherConfig, actor: RolePlace) -> RolePlace:
    """Loaded for itself, also from the student's own folder, unless it shares the backbone."""
    if isinstance(teacher.model, BackboneTeacherConfig):
        adapter = None if teacher.model.adapter is None else "teacher"
        return RolePlace(backbone=actor.backbone, adapter=adapter)
    if isinstance(teacher.model, HFModelConfig):
        return RolePlace(backbone=f"teacher {teacher.model.path.name}")
    return RolePlace(backbone="teacher behind url" if teacher.model is None else "teacher toy")
