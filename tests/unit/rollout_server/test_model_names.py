from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniverl_dist.errors import ConfigError
from rollout_server.model_names import checked_name, shown_name, shown_names

USUAL = [
    "Qwen/Qwen3-8B",
    "gpt-4o-mini:ft:team::8Xy",
    "/data/models/Some Model (v1.5)/q4_k_m.gguf",
    "C:\\models\\a.gguf",
    "org/model@main",
    "模型/模型-7B",
]
ODD = [
    "",
    "  ",
    "a\nb",
    "a|b",
    "<b>",
    "a\x1b[31m",
    "a\u202eb",
    "`a`",
    "a*b",
    "a\u200bb",
    "שלום",
    "x" * 201,
]


@pytest.mark.parametrize("name", USUAL)
def test_usual_names_stay(name: str) -> None:
    assert checked_name(name, "the server") == name


@pytest.mark.parametrize("name", ODD)
def test_what_a_table_cannot_show_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^the server calls its model .*--served-model-name"):
        checked_name(name, "the server")


@given(st.text())
def test_what_is_shown_breaks_nothing(name: str) -> None:
    shown = shown_name(name)
    assert shown.isprintable()
    assert not set(shown) & set("|<>`*\u202e")
    assert shown_name(shown) == shown


def test_a_long_name_and_a_long_list_are_cut() -> None:
    assert shown_name("x" * 201) == "x" * 200 + "..."
    assert shown_names([]) == "none"
    assert shown_names(["a", "b\nc"]) == "a, b?c"
    assert shown_names([str(i) for i in range(30)]).endswith("18, 19, and 10 more")
