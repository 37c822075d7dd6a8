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


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("optim.lr=1e300", "optim.lr: found 1e[+]300, expected at most 10"),
        ("optim.eps=1e300", "optim.eps: found 1e[+]300, expected at most 1"),
        ("optim.weight_decay=1e300", "optim.weight_decay: found 1e[+]300, expected at most 100"),
        ("student.warmup.learning_rate=1e300", "learning_rate: found 1e[+]300, expected at most"),
        ("teacher.fit.learning_rate=11", "teacher.fit.learning_rate: found 11, expected at most"),
        ("distill={temperature: 1e-300}", "distill.temperature: found 1e-300, expected at least"),
        ("rollout.temperature=1e-300", "rollout.temperature: found 1e-300, expected at least 0.01"),
        (
            "evaluation.temperature=1e-300",
            "temperature: found 1e-300, expected at least 0.01, or 0",
        ),
        ("opd.coef=1e300", "opd.coef: found 1e[+]300, expected at most"),
        ("loss.kl_coef=1e300", "loss.kl_coef: found 1e[+]300, expected at most"),
        ("distill={coef: 1e300}", "distill.coef: found 1e[+]300, expected at most"),
    ],
)
def test_a_number_that_no_update_can_use_is_refused(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(Path("tests/fixtures/tiny_bfcl.yaml"), [override])


def test_an_evaluation_may_decode_greedily() -> None:
    recipe = Path("tests/fixtures/tiny_bfcl.yaml")
    for temperature in (0.0, 0.01):
        found = load_config(recipe, [f"evaluation.temperature={temperature}"]).config
        assert found.evaluation.temperature == temperature
