"""Base of all config models, and the number types they share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class ConfigModel(BaseModel):
    """Strict and frozen: unknown keys, wrong types and later changes are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
    )


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0.01, allow_inf_nan=False)]
"""Far below 1, logits divided by it leave log-probabilities of no use, and in the end overflow."""
LearningRate = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
"""A step of Adam is as long as it: any above is a slip of the pen."""
Coefficient = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
"""Of a term of the loss."""
