from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from miniverl_dist.config.problems import Problem, dotted, explain, explain_in_line


class Square(BaseModel, extra="forbid"):
    kind: Literal["square"]
    side: int


class Disc(BaseModel, extra="forbid"):
    kind: Literal["disc"]
    radius: float
    square: str = ""


class Drawing(BaseModel, extra="forbid"):
    shapes: list[Annotated[Square | Disc, Field(discriminator="kind")]] = []
    sizes: dict[str, int] = {}
    label: Square | str | None = None


def lines(**data: object) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Drawing.model_validate(data, strict=True)
    return [str(problem) for problem in explain(caught.value, Drawing)]


def test_list_items_of_a_union() -> None:
    assert lines(shapes=[{"kind": "square", "side": "x"}]) == [
        "shapes[0].side: found 'x', expected an integer"
    ]


def test_a_field_named_like_another_kind() -> None:
    assert lines(shapes=[{"kind": "disc", "radius": 1.0, "square": 3}]) == [
        "shapes[0].square: found 3, expected text"
    ]


def test_keys_of_an_open_mapping_are_part_of_the_path() -> None:
    assert lines(sizes={"a": None}) == ["sizes.a: found null, expected an integer"]


def test_branches_without_a_kind_do_not_enter_the_path() -> None:
    assert lines(label=3) == ["label: found 3, expected a mapping or text"]


@pytest.mark.parametrize(
    ("value", "words"), [([1, 2], "a list of 2"), ({"a": 1}, "a mapping"), (True, "true")]
)
def test_what_was_found_in_words(value: object, words: str) -> None:
    assert lines(sizes={"a": value}) == [f"sizes.a: found {words}, expected an integer"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("teacher: give either", "teacher: give either"),
        ("teacher.fit is missing", "teacher.fit is missing"),
        ("teacher is missing", "teacher is missing"),
        ("teachers are many", "teacher: teachers are many"),
        ("give either", "teacher: give either"),
    ],
)
def test_a_text_that_names_its_field_is_not_given_the_name_again(text: str, shown: str) -> None:
    assert str(Problem(("teacher",), text)) == shown
    assert str(Problem((), text)) == text


def test_dotted_paths() -> None:
    assert dotted(("a", 0, "b")) == "a[0].b"
    assert dotted(()) == ""


def test_several_problems_on_one_line() -> None:
    with pytest.raises(ValidationError) as caught:
        Drawing.model_validate({"sizes": dict.fromkeys("abcd", "x")}, strict=True)
    assert explain_in_line(caught.value, Drawing, limit=2) == (
        "sizes.a: found 'x', expected an integer; sizes.b: found 'x', expected an integer; 2 more"
    )
