"""Toy model folders: byte-identical writing, and refusals that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.backends.weights_io import (
    MODEL_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    load_toy_folder,
    read_json,
    read_tensors,
    save_toy_folder,
    write_json,
    write_tensors,
)
from miniverl_dist.errors import CheckpointError
from tests.support.toy import TOKENIZER, VOCABULARY_IDS, tiny_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = ToyModel(tiny_config(), VOCABULARY_IDS, seed=2)
    save_toy_folder(
        tmp_path / "model", model.config, VOCABULARY_IDS[::-1], TOKENIZER, model.arrays()
    )
    return tmp_path / "model"


def test_a_folder_holds_the_whole_model(folder: Path) -> None:
    found = load_toy_folder(folder)
    original = ToyModel(tiny_config(), VOCABULARY_IDS, seed=2)
    assert found.config == tiny_config()
    assert found.vocabulary_ids.tolist() == list(VOCABULARY_IDS)
    assert found.tokenizer == TOKENIZER
    loaded = ToyModel.from_folder(found).arrays()
    assert all(np.array_equal(loaded[name], array) for name, array in original.arrays().items())


def test_equal_models_give_equal_bytes(folder: Path, tmp_path: Path) -> None:
    arrays = dict(reversed(load_toy_folder(folder).weights.items()))
    save_toy_folder(tmp_path / "again", tiny_config(), VOCABULARY_IDS, TOKENIZER, arrays)
    for name in (WEIGHTS_FILE, MODEL_FILE, VOCABULARY_FILE):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_transposed_view_is_stored_as_what_it_shows(tmp_path: Path) -> None:
    view = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_tensors(tmp_path / "t", {"view": view})
    assert np.array_equal(read_tensors(tmp_path / "t")["view"], view)


def test_truncated_weights_are_refused(folder: Path) -> None:
    path = folder / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a complete safetensors"):
        load_toy_folder(folder)


@pytest.mark.parametrize("name", [WEIGHTS_FILE, MODEL_FILE, VOCABULARY_FILE])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"cannot read {name}"):
        load_toy_folder(folder)


def change_model_json(folder: Path, **changes: object) -> None:
    description = read_json(folder / MODEL_FILE)
    write_json(folder / MODEL_FILE, description | changes)


def test_another_architecture_is_named(folder: Path) -> None:
    change_model_json(folder, architecture="LlamaForCausalLM")
    with pytest.raises(CheckpointError, match="'LlamaForCausalLM', expected"):
        load_toy_folder(folder)


@pytest.mark.parametrize("content", ["[]", "null", "{", '{"architecture": null}'])
def test_a_broken_description_is_one_clear_error(folder: Path, content: str) -> None:
    (folder / MODEL_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.json"):
        load_toy_folder(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"kind": "toy", "num_layers": "two"}},
        {"config": {"kind": "os.system"}},
        {"tokenizer": {"name": "x"}},
        {"tokenizer": None},
    ],
)
def test_malformed_fields_are_one_clear_error(folder: Path, changes: dict[str, object]) -> None:
    change_model_json(folder, **changes)
    with pytest.raises(CheckpointError, match="malformed"):
        load_toy_folder(folder)


def test_a_vocabulary_other_than_the_described_is_refused(folder: Path) -> None:
    ids = json.loads((folder / VOCABULARY_FILE).read_text())
    write_json(folder / VOCABULARY_FILE, [*ids[:-1], ids[-1] + 1])
    with pytest.raises(CheckpointError, match=r"vocabulary\.json holds 53 ids with SHA-256"):
        load_toy_folder(folder)


def test_weights_of_other_sizes_are_named(folder: Path) -> None:
    arrays = dict(load_toy_folder(folder).weights)
    other = arrays | {"layers.1.down": np.zeros((24, 41), dtype=np.float32)}
    write_tensors(folder / WEIGHTS_FILE, other)
    with pytest.raises(CheckpointError, match=r"'layers.1.down' is float32 \(24, 41\), expected"):
        load_toy_folder(folder)
    write_tensors(folder / WEIGHTS_FILE, arrays | {"embed": arrays["embed"].astype(np.float64)})
    with pytest.raises(CheckpointError, match="'embed' is float64"):
        load_toy_folder(folder)


def test_missing_and_surplus_weights_are_named(folder: Path) -> None:
    arrays = dict(load_toy_folder(folder).weights)
    write_tensors(folder / WEIGHTS_FILE, arrays | {"lm_head": arrays["embed"]})
    with pytest.raises(CheckpointError, match=r"'lm_head'.*another architecture"):
        load_toy_folder(folder)
    del arrays["final_norm"]
    write_tensors(folder / WEIGHTS_FILE, arrays)
    with pytest.raises(CheckpointError, match="lack 'final_norm'"):
        load_toy_folder(folder)


def test_a_place_that_cannot_be_written_is_a_checkpoint_error(folder: Path) -> None:
    arrays = load_toy_folder(folder).weights
    with pytest.raises(CheckpointError, match="cannot make"):
        save_toy_folder(folder / MODEL_FILE / "x", tiny_config(), [1], TOKENIZER, arrays)
    (folder / "weights").mkdir()
    with pytest.raises(CheckpointError, match="cannot write weights"):
        write_tensors(folder / "weights", arrays)
