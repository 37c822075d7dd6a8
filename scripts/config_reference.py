"""docs/configuration.md and docs/recipes.md, from the config models and configs/.

python -m scripts.config_reference            say whether they are up to date (exit code 1 if not)
python -m scripts.config_reference --write    write them anew
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from miniverl_dist.config.load import load_config, load_teacher_service
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.serve import TEACHER_SERVICES

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION, RECIPES = ROOT / "docs" / "configuration.md", ROOT / "docs" / "recipes.md"
BOUNDS = {Ge: (">= ", "ge"), Gt: ("> ", "gt"), Le: ("<= ", "le"), Lt: ("< ", "lt")}
LENGTHS = {MinLen: ("at least", "min_length"), MaxLen: ("at most", "max_length")}

CONFIGURATION_HEAD = """\
# Configuration reference

Written by `python -m scripts.config_reference --write` from the models in `miniverl_dist/config/`;
do not edit. Every recipe in `configs/` is an example; `miniverl-dist show-config CONFIG` prints one
with all its defaults.

A field without a default has to be given. Unknown keys, wrong types and values out of bounds are
errors with file and line. Where a section can be one of several, its `kind` says which.
"""
RECIPES_HEAD = """\
# Recipes

Written by `python -m scripts.config_reference --write` from the heads of the files in `configs/`;
do not edit. Start one with `miniverl-dist train configs/NAME.yaml`, and look at it beforehand with
`miniverl-dist plan` or `miniverl-dist show-config`.
"""


def models_in(annotation: object) -> list[type[BaseModel]]:
    """Config models that a field's type names, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def reachable(*roots: type[BaseModel]) -> list[type[BaseModel]]:
    """Models of a recipe, each behind the first that names it."""
    found: list[type[BaseModel]] = []
    waiting = list(roots)
    while waiting:
        model = waiting.pop(0)
        if model in found:
            continue
        found.append(model)
        fields = model.model_fields.values()
        waiting[:0] = [m for field in fields for m in models_in(field.annotation)]
    return found


def shown_type(annotation: object, metadata: tuple[Any, ...] = ()) -> str:
    """A type in the words of a recipe, with its bounds."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return shown_type(parts[0], (*parts[1:], *metadata))
    bounds = "".join(f", {bound}" for bound in shown_bounds(metadata))
    if origin is Literal:
        return " \\| ".join(f"`{json.dumps(part).strip(chr(34))}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " \\| ".join(shown_type(part) for part in parts) + bounds
    if origin is tuple:
        inner = [shown_type(part) for part in parts if part is not Ellipsis]
        text = f"list of {inner[0]}" if Ellipsis in parts else f"list: {', '.join(inner)}"
        return text + bounds
    if origin is dict:
        return f"mapping of {shown_type(parts[0])} to {shown_type(parts[1])}{bounds}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    names: Mapping[Any, str] = {str: "text", bool: "true \\| false", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation))) + bounds


def shown_bounds(metadata: tuple[Any, ...]) -> Iterator[str]:
    """Bounds that a field's constraints stand for."""
    for one in metadata:
        if isinstance(one, FieldInfo):
            yield from shown_bounds(tuple(one.metadata))
        elif type(one) in BOUNDS:
            sign, name = BOUNDS[type(one)]
            yield f"{sign}{getattr(one, name):g}"
        elif type(one) in LENGTHS:
            word, name = LENGTHS[type(one)]
            yield f"{word} {getattr(one, name)} long"
        elif pattern := getattr(one, "pattern", None):
            yield f"matches `{pattern}`".replace("|", "\\|")


def shown_default(field: FieldInfo) -> str:
    """A field's default as a recipe would write it; empty where it has to be given."""
    if field.default_factory is not None:
        return "`{}`"
    value = field.default
    if value is PydanticUndefined:
        return ""
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{json.dumps(value, default=str)}`"


def one_line(text: str | None) -> str:
    """A docstring as a cell of a table."""
    code = re.sub(r"``(.+?)``", r"`\1`", text or "")
    return re.sub(r"\s+", " ", code).strip().replace("|", "\\|")


def section(model: type[BaseModel]) -> str:
    """One model's heading, docstring and table."""
    rows = [
        f"| `{name}` | {shown_type(field.annotation, tuple(field.metadata))} "
        f"| {shown_default(field)} | {one_line(field.description)} |"
        for name, field in model.model_fields.items()
    ]
    head = ["| field | type | default | |", "|---|---|---|---|"]
    return "\n".join([f"## {model.__name__}", "", one_line(model.__doc__), "", *head, *rows, ""])


def configuration() -> str:
    """The whole reference."""
    parts = [section(model) for model in reachable(RunConfig, *TEACHER_SERVICES.values())]
    return "\n".join([CONFIGURATION_HEAD, *parts])


def header(path: Path) -> str:
    """The comment at the top of a recipe."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines).strip()


def recipe_section(path: Path) -> str:
    """One recipe: its path, what it runs, and what its author says."""
    if path.name.startswith("teacher_"):
        what = f"a teacher's service of kind `{load_teacher_service(path).kind}`"
    else:
        config = load_config(path).config
        what = (
            f"objective `{config.objective}`, environment `{config.environment.kind}`, "
            f"student `{config.student.model.kind}`, runtime `{config.runtime}`"
        )
    name = path.relative_to(ROOT).as_posix()
    return f"## {path.stem}\n\n`{name}`: {what}.\n\n```text\n{header(path)}\n```\n"


def recipes() -> str:
    """The list of all recipes."""
    return "\n".join(
        [RECIPES_HEAD, *map(recipe_section, sorted((ROOT / "configs").glob("*.yaml")))]
    )


PAGES = {CONFIGURATION: configuration, RECIPES: recipes}


def main() -> None:
    """Write the pages, or say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write them anew")
    is_written = parser.parse_args().write
    for page, make in PAGES.items():
        if is_written:
            page.write_text(make(), encoding="utf-8")
    stale = [page.name for page, make in PAGES.items() if page.read_text("utf-8") != make()]
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}; run python -m scripts.config_reference --write")


if __name__ == "__main__":
    main()
