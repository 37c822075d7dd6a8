"""Which weights play which role: actor, teacher and reference never share a set of them.

They may share a backbone, the weights that nobody trains, and differ in their adapters. For the
manifest; names only, never paths.
"""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from miniverl_dist.errors import ConfigError
from miniverl_dist.schemas.messages import FrozenModel


class RolePlace(FrozenModel):
    """A set of weights: a backbone, and what is added to it."""

    backbone: str
    """One copy of a model's weights in this run; two copies of one model have two names."""
    adapter: str | None = None
    """None: the backbone as it is."""
    is_trained: bool = False

    @property
    def weights(self) -> tuple[str, str | None]:
        """What two roles must not have in common."""
        return self.backbone, self.adapter


class RoleGraph(FrozenModel):
    """Every role of a run with its weights."""

    actor: RolePlace
    teacher: RolePlace | None = None
    reference: RolePlace | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        places = self.by_role
        for index, (role, place) in enumerate(places.items()):
            if place.is_trained != (role == "actor"):
                raise ConfigError(f"role {role}: the actor is trained, and nobody else")
            for other in list(places)[:index]:
                self._require_apart(other, role)
        return self

    @property
    def by_role(self) -> dict[str, RolePlace]:
        """Roles that are played."""
        found = {"actor": self.actor, "teacher": self.teacher, "reference": self.reference}
        return {role: place for role, place in found.items() if place is not None}

    def _require_apart(self, first: str, second: str) -> None:
        one, other = self.by_role[first], self.by_role[second]
        if one.weights == other.weights:
            raise ConfigError(
                f"roles {first} and {second} are both played by {one.backbone!r} with adapter "
                f"{one.adapter!r}: each role needs weights of its own"
            )
        trains_shared = one.backbone == other.backbone and any(
            place.is_trained and place.adapter is None for place in (one, other)
        )
        if trains_shared:
            raise ConfigError(
                f"roles {first} and {second} share the backbone {one.backbone!r}, which is trained "
                "itself: every step would change both; train an adapter, or use a second copy"
            )
