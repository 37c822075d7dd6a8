"""The lab's sections: divergence, selection, memory, demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from miniverl_dist.config.base import (
    Coefficient,
    ConfigModel,
    Fraction,
    NonNegativeFloat,
    PositiveInt,
    Temperature,
)


class EntropyAwareConfig(ConfigModel):
    """Forward KL where the teacher is unsure.

    Reverse KL makes the student choose one of many continuations that the teacher allows; at rows
    where the teacher's entropy is high, a share of forward KL keeps the others alive.

    Source:
        arXiv:2603.07079.
    """

    threshold_nats: NonNegativeFloat = 1.0
    """Rows whose teacher entropy is above it get the mixture."""
    forward_weight: Fraction = 0.5
    """Share of forward KL there; the rest stays the configured divergence."""


class DistillConfig(ConfigModel):
    """How far the student's distribution is from the teacher's, row by row."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd", "cross_entropy", "sampled_nll"] = (
        "reverse_kl"
    )
    """``forward_kl`` KL(teacher || student); ``reverse_kl`` KL(student || teacher); ``jsd`` with
    ``beta``; ``cross_entropy`` forward KL and the teacher's entropy, the same gradient;
    ``sampled_nll`` the written token alone, without a teacher."""
    support: Literal["exact_full_vocab", "top_k_tail"] = "top_k_tail"
    """Over every token, or over the teacher's ``top_k`` and one bucket for all others. Exact needs
    a teacher of the student's tokenizer that is in memory during the update."""
    top_k: PositiveInt = 32
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """``jsd``: weight of the teacher in the mixture."""
    coef: Annotated[Coefficient, Field(gt=0)] = 1.0
    """Weight of the divergence in the loss; where it is the whole loss, it scales the gradient
    before ``optim.grad_clip``."""
    temperature: Temperature = 1.0
    """Both distributions are compared at it."""
    entropy_aware: EntropyAwareConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.entropy_aware is not None and self.divergence not in ("reverse_kl", "jsd"):
            raise ValueError(
                f"distill.entropy_aware mixes forward KL into reverse_kl or jsd, found "
                f"{self.divergence}"
            )
        return self

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher's distribution enters."""
        return self.divergence != "sampled_nll"


class SelectionConfig(ConfigModel):
    """At which written tokens the teacher is asked for its distribution."""

    kind: Literal["all_model_tokens", "tool_and_final", "uniform_ratio", "hybrid"] = (
        "all_model_tokens"
    )
    """``tool_and_final``: spans with calls and final answers; ``uniform_ratio``: a seeded share of
    all; ``hybrid``: those of ``tool_and_final`` and a seeded share of the rest."""
    ratio: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Of ``uniform_ratio`` and ``hybrid``."""


class MemoryConfig(ConfigModel):
    """Whether student and teacher are in memory at once."""

    strategy: Literal["resident", "swap", "auto"] = "auto"
    """``resident``: both; ``swap``: the teacher is loaded, asked and let go before the update;
    ``auto`` chooses by an estimate and writes down why. It never changes the objective."""
    limit_bytes: PositiveInt | None = None
    """Memory that ``auto`` may plan with; None takes what the machine has free."""


class DemonstrationConfig(ConfigModel):
    """What ``sft`` and ``offline_kd`` learn from: scripted episodes, or a run's stored ones."""

    trajectories: Path | None = None
    """A ``trajectories.jsonl`` whose episodes are learned from; None plays the oracle's."""
    only_passed: bool = True
    """Leave out stored episodes that the verifier did not pass; scripted ones are all learned from,
    those that ``noisy_fraction`` spoils too."""
    traces_per_task: PositiveInt = 8
    """Scripted episodes of each task at each horizon."""
    max_tail_calls: PositiveInt = 1
    """Horizons T of scripted episodes: 1 up to this."""
    noisy_fraction: Fraction = 0.0
    """Share of scripted episodes with a spoilt call."""
