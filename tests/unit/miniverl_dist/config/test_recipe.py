from __future__ import annotations

from pathlib import Path

import pytest

from miniverl_dist.config.load import load_config
from miniverl_dist.config.recipe import BfclConfig
from miniverl_dist.errors import ConfigError

RECIPE = f"""
extends: {Path("tests/fixtures/tiny_bfcl.yaml").resolve()}
environment: {{categories: CATEGORIES}}
"""


def load(tmp_path: Path, categories: str) -> BfclConfig:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("CATEGORIES", categories), encoding="utf-8")
    section = load_config(path).config.environment
    assert isinstance(section, BfclConfig)
    return section


class TestBfclCategories:
    def test_base_alone_is_the_default(self) -> None:
        assert BfclConfig().categories == ("base",)

    def test_a_recipe_names_them_in_order(self, tmp_path: Path) -> None:
        found = load(tmp_path, "[miss_param, base]")
        assert found.categories == ("miss_param", "base")
        assert BfclConfig.model_validate(found.model_dump()) == found

    @pytest.mark.parametrize(
        ("categories", "message"),
        [
            ("[base, miss_func, base]", "base, miss_func, base names one more than once"),
            ("[]", "categories: "),
            ("[multi_turn_base]", r"categories\[0\]: .*miss_param"),
            ("base", "categories: "),
            ("[1]", r"categories\[0\]: "),
        ],
    )
    def test_what_is_no_list_of_categories_is_refused(
        self, tmp_path: Path, categories: str, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, categories)
