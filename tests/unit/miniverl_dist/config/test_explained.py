"""Recipes with the meaning of each field: still the same recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.cli import app
from miniverl_dist.config.explained import explained_yaml
from miniverl_dist.config.load import load_config
from miniverl_dist.config.yaml_text import parse_yaml

ROOT = Path(__file__).resolve().parents[4]
RECIPES = ("bfcl_qwen36_35b_2x8_h100", "local_bfcl", "lab_hf")


@pytest.mark.parametrize("name", RECIPES)
def test_it_reads_back_as_the_same_config(name: str) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml").config
    text = explained_yaml(config)
    assert parse_yaml(text.encode(), name).data == config.model_dump(mode="json")


def test_each_field_has_its_words_above_it() -> None:
    config = load_config(ROOT / "configs" / "bfcl_qwen36_35b_2x8_h100.yaml").config
    lines = explained_yaml(config).splitlines()
    place = lines.index("    load_weights_by: disk")
    above = " ".join(line.strip(" #") for line in lines[place - 3 : place])
    assert "How published weights get from the actor into its server: `disk`, through" in above
    assert max(map(len, lines)) < 140


def test_the_command_prints_it() -> None:
    recipe = str(ROOT / "configs" / "local_bfcl.yaml")
    result = CliRunner().invoke(app, ["show-config", recipe, "--explain", "-o", "seed=7"])
    assert result.exit_code == 0
    assert "seed: 7" in result.output
    assert "# Names the run directory below `runs/`." in result.output
