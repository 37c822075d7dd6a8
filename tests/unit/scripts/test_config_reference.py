"""The generated pages are those of the models and recipes as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from miniverl_dist.config.base import ConfigModel, Fraction, PositiveInt
from miniverl_dist.config.models import RunConfig
from scripts.config_reference import PAGES, ROOT, header, reachable, section


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_is_up_to_date(page: Path) -> None:
    found = page.read_text(encoding="utf-8")
    assert found == PAGES[page](), "run `python -m scripts.config_reference --write`"


def test_every_section_of_a_recipe_is_there() -> None:
    text = next(page for page in PAGES if page.stem == "configuration").read_text()
    for name in RunConfig.model_fields:
        assert f"| `{name}` |" in text
    headings = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    links = set(re.findall(r"\]\(#(\w+)\)", text))
    assert len(headings) == len(set(headings)) > 40
    assert links <= {name.lower() for name in headings}


def test_every_recipe_is_there_with_its_head() -> None:
    text = next(page for page in PAGES if page.stem == "recipes").read_text()
    for path in (ROOT / "configs").glob("*.yaml"):
        assert f"## {path.stem}\n" in text
        assert header(path).strip() in text


class Inner(ConfigModel):
    """One | other."""

    kind: Literal["a", "b"] = "a"


class Outer(ConfigModel):
    """Holds others."""

    count: PositiveInt
    share: Fraction = 0.5
    names: Annotated[tuple[str, ...], Field(min_length=2)] = ("x", "y")
    maybe: PositiveInt | None = None
    """Of ``count``; or
    nothing."""
    inner: Inner = Inner()
    extra: dict[str, str] = Field(default_factory=dict)


def test_how_fields_are_shown() -> None:
    rows = section(Outer).splitlines()[6:]
    assert rows == [
        "| `count` | int, > 0 |  |  |",
        "| `share` | float, >= 0, <= 1 | `0.5` |  |",
        '| `names` | list of text, at least 2 long | `["x", "y"]` |  |',
        "| `maybe` | int, > 0 \\| null | `null` | Of `count`; or nothing. |",
        "| `inner` | [Inner](#inner) | its defaults |  |",
        "| `extra` | mapping of text to text | `{}` |  |",
    ]
    assert section(Inner).splitlines()[2:7] == [
        "One \\| other.",
        "",
        "| field | type | default | |",
        "|---|---|---|---|",
        '| `kind` | `a` \\| `b` | `"a"` |  |',
    ]


def test_models_come_once_behind_who_names_them() -> None:
    class Last(BaseModel):
        outer: Outer
        inner: Inner

    assert reachable(Last) == [Last, Outer, Inner]
