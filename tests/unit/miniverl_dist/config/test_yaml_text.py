from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.config.yaml_text import dump_yaml, parse_yaml
from miniverl_dist.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        ("3.", 3.0),
        (".5", 0.5),
        ("on", "on"),
        ("yes", "yes"),
        ("no", "no"),
        ("True", True),
        ("~", None),
        ("", None),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("'1e-6'", "1e-6"),
        ('"null"', "null"),
        ("! 5", "5"),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    found = parse_yaml(f"a: {text}", "f.yaml").data["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml:3: found key `a` repeated, first given in line 1"),
        ("a:\n  b: 1\n  b: 1", "f.yaml:3: found key `b` repeated, first given in line 2"),
        ("x: 1\na: !!python/name:os.system y", "f.yaml:2: found tag"),
        ("a: {<<: {b: 1}}", "f.yaml:1: found merge key `<<`"),
        ("a: 1\n---\nb: 1", "f.yaml:2: found a second document"),
        ("a: &x [*x]", "f.yaml:1: found alias *x without an anchor"),
        ("a: 1\nb: .inf", "f.yaml:2: found .inf, expected a finite number"),
        ("a: 1e999", "f.yaml:1: found 1e999"),
        ("? [a]\n: b", "f.yaml:1: found a key that is not plain text"),
        ("a: 1\nb: [1", "f.yaml:2: not valid YAML"),
        ("a: \x07", "f.yaml: not valid YAML"),
    ],
)
def test_refusals_name_file_and_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yaml")
    assert str(caught.value).startswith(message)


def test_bytes_that_are_not_utf8_are_named() -> None:
    with pytest.raises(ConfigError, match=r"f.yaml: expected UTF-8, found byte 0xff at offset 3"):
        parse_yaml(b"a: \xff", "f.yaml")


def test_byte_order_mark_and_empty_documents() -> None:
    assert parse_yaml(b"\xef\xbb\xbfa: 1", "f").data == {"a": 1}
    assert parse_yaml(b"", "f").data is None
    assert parse_yaml(b"# nothing\n", "f").data is None


def test_lines_of_nested_paths() -> None:
    lines = parse_yaml("a:\n  b: 1\n  c:\n  - x\n  - y: 2\n", "f").lines
    assert lines["a",] == 1
    assert lines["a", "c"] == 3
    assert lines["a", "c", 1, "y"] == 5


def test_alias_repeats_its_anchor() -> None:
    assert parse_yaml("a: &x {b: [1]}\nc: *x", "f").data == {"a": {"b": [1]}, "c": {"b": [1]}}


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs", "Cc"), include_characters="\n\t"))
    | st.sampled_from(["on", "yes", "1e-6", "1_0", ".inf", ".nan", "<<", "=", "0o7", "null", "- a"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abé:-# ?"), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(VALUES)
def test_what_is_written_reads_back(value: object) -> None:
    found = parse_yaml(dump_yaml({"v": value}), "f").data
    assert json.dumps(found) == json.dumps({"v": value})


def test_mappings_keep_their_order() -> None:
    assert dump_yaml({"b": 1, "a": [1, 2]}) == "b: 1\na:\n- 1\n- 2\n"


def test_a_document_cannot_blow_up() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]")
    with pytest.raises(ConfigError, match="aliases that spell out more than"):
        parse_yaml("\n".join(lines), "bomb.yaml")
    with pytest.raises(ConfigError, match="nested more than"):
        parse_yaml("[" * 3000 + "]" * 3000, "deep.yaml")
    with pytest.raises(ConfigError, match="a number of 5000 digits"):
        parse_yaml("seed: " + "9" * 5000, "long.yaml")
    assert parse_yaml("a: &x [1, 2]\nb: *x", "fine.yaml").data == {"a": [1, 2], "b": [1, 2]}
