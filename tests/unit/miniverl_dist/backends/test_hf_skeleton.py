"""What a folder's model would be, without its numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.hf_files import read_hf_files
from miniverl_dist.backends.hf_skeleton import first_sentence, require_described, skeleton
from miniverl_dist.errors import ConfigError
from tests.support.hf_student import FAMILIES, student_folder
from tests.support.tiny_hf import ARCHITECTURES, model_folder


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("It is wrong. Upgrade from source!\n`pip install git+`"), "It is wrong"),
        (ValueError("Version 1.2 of a.json is old"), "Version 1.2 of a.json is old"),
        (KeyError("field"), "'field'"),
        (TypeError(), "TypeError"),
    ],
)
def test_what_a_library_says_in_one_sentence(error: Exception, said: str) -> None:
    assert first_sentence(error) == said


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_stored_models_are_what_they_say(family: str, tied: bool) -> None:
    folder = student_folder(family, tied=tied)
    before = torch.random.get_rng_state()
    module = skeleton(folder, "here")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    require_described(module, read_hf_files(folder).tensors, "here")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_experts_that_are_stored_in_another_form_are_left_to_the_loader(architecture: str) -> None:
    folder = model_folder(architecture)
    require_described(skeleton(folder, "here"), read_hf_files(folder).tensors, "here")


def edited(folder: Path, **changes: Any) -> Path:
    copied = shutil.copytree(student_folder("llama", tied=False), folder)
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return copied


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"here: .* tensor 'model\.layers\.2\..*which the weights lack"),
        ({"vocab_size": 99}, "'model.embed_tokens.weight' is stored as 100 x 24, .* 99 x 24"),
        ({"num_key_value_heads": 1}, r"'model\.layers\.0\.self_attn\.k_proj\.weight' is stored"),
    ],
)
def test_another_models_description_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = edited(tmp_path / "m", **changes)
    with pytest.raises(ConfigError, match=message):
        require_described(skeleton(folder, "here"), read_hf_files(folder).tensors, "here")


@pytest.mark.parametrize("model_type", ["qwen99", "clip", 7])
def test_a_type_that_is_no_causal_lm_is_refused_in_one_line(
    model_type: object, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="describes no causal LM that tr") as caught:
        skeleton(edited(tmp_path / "m", model_type=model_type), "here")
    assert "\n" not in str(caught.value)
    assert "pip install" not in str(caught.value)
