"""No role can be played by the weights of another."""

from __future__ import annotations

import pytest

from miniverl_dist.errors import ConfigError
from miniverl_dist.schemas.roles import RoleGraph, RolePlace

BASE = "student qwen"
ACTOR = RolePlace(backbone=BASE, adapter="actor", is_trained=True)
WHOLE = RolePlace(backbone=BASE, is_trained=True)


def test_adapters_over_one_backbone_are_roles_of_their_own() -> None:
    graph = RoleGraph(
        actor=ACTOR,
        teacher=RolePlace(backbone=BASE, adapter="teacher"),
        reference=RolePlace(backbone=BASE),
    )
    assert list(graph.by_role) == ["actor", "teacher", "reference"]
    assert RoleGraph.model_validate_json(graph.model_dump_json()) == graph


@pytest.mark.parametrize(
    ("actor", "others", "message"),
    [
        (ACTOR, {"reference": RolePlace(backbone=BASE, adapter="actor")}, "actor and reference"),
        (ACTOR, {"teacher": RolePlace(backbone=BASE, adapter="actor")}, "actor and teacher"),
        (
            ACTOR,
            {"teacher": RolePlace(backbone="t"), "reference": RolePlace(backbone="t")},
            "teacher and reference are both played by 't'",
        ),
        (WHOLE, {"reference": RolePlace(backbone=BASE)}, "both played by"),
        (
            WHOLE,
            {"teacher": RolePlace(backbone=BASE, adapter="teacher")},
            "share the backbone 'student qwen', which is trained itself",
        ),
        (RolePlace(backbone=BASE), {}, "the actor is trained, and nobody else"),
        (
            ACTOR,
            {"teacher": RolePlace(backbone="t", is_trained=True)},
            "role teacher: the actor is trained",
        ),
    ],
)
def test_an_alias_is_refused(actor: RolePlace, others: dict[str, RolePlace], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoleGraph(actor=actor, **others)
