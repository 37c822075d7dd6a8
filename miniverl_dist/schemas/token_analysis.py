"""What was made of each token that a student wrote: a line of ``token_analysis.jsonl``."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from miniverl_dist.errors import RecordError
from miniverl_dist.schemas.messages import FrozenModel
from miniverl_dist.schemas.trajectory import SpanKind


class TokenAnalysis(FrozenModel):
    """One trained trajectory; its arrays are about emitted tokens only, in order.

    Raises:
        RecordError: arrays that contradict each other.
    """

    trajectory_id: str
    group_id: str
    positions: tuple[Annotated[int, Field(ge=1)], ...]
    """Rising places in ``Trajectory.token_ids``."""
    token_ids: tuple[int, ...]
    kinds: tuple[SpanKind, ...]
    rollout_logprobs: tuple[float, ...]
    """Nats by the engine when sampling."""
    advantages: tuple[float, ...]
    """All terms together, as the update used them."""
    units: tuple[int | None, ...]
    """Unit of each token, counted through the trajectory; None where no unit covers it."""
    unit_reverse_kl: tuple[float, ...]
    """Student minus teacher in nats, one for each unit."""
    opd_weights: tuple[float | None, ...]
    """Clipped, with lookahead; None where no unit covers the token."""
    is_stopped: tuple[bool, ...]
    """Behind a stop, where the teacher has no say."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        size = len(self.positions)
        for name in (
            "token_ids",
            "kinds",
            "rollout_logprobs",
            "advantages",
            "units",
            "opd_weights",
            "is_stopped",
        ):
            found = len(getattr(self, name))
            if found != size:
                raise RecordError(
                    f"token analysis of {self.trajectory_id}: {found} {name} for {size} positions"
                )
        if any(a >= b for a, b in zip(self.positions, self.positions[1:], strict=False)):
            raise RecordError(f"token analysis of {self.trajectory_id}: positions must rise")
        known = [unit for unit in self.units if unit is not None]
        if known and not 0 <= min(known) <= max(known) < len(self.unit_reverse_kl):
            raise RecordError(
                f"token analysis of {self.trajectory_id}: units {min(known)} .. {max(known)}, but "
                f"{len(self.unit_reverse_kl)} log-ratios"
            )
        return self


class TokenAnalysisLine(TokenAnalysis):
    """As it stands in the file."""

    step: Annotated[int, Field(ge=1)]
