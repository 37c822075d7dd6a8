"""A config as YAML with what each field means above it, from the fields' own docstrings."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final

from pydantic import BaseModel

from miniverl_dist.config.yaml_text import dump_yaml

_COLUMNS: Final = 96


def explained_yaml(config: BaseModel) -> str:
    """Every field, defaults included; reads back as the same config."""
    return "\n".join(_lines(config)) + "\n"


def _lines(model: BaseModel) -> Iterator[str]:
    for name, value in model:
        yield from _comment(type(model).model_fields[name].description)
        if isinstance(value, BaseModel):
            yield f"{name}:"
            yield from textwrap.indent("\n".join(_lines(value)), "  ").split("\n")
        else:
            yield from dump_yaml(model.model_dump(mode="json", include={name})).splitlines()


def _comment(text: str | None) -> Iterator[str]:
    if text:
        for line in textwrap.wrap(" ".join(text.replace("``", "`").split()), _COLUMNS):
            yield f"# {line}"
