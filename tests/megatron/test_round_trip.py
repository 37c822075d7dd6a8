# ruff: noqa: E402 - without megatron nothing below can be imported
"""Hugging Face -> megatron -> Hugging Face, bit for bit, in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.support.requirements import require_megatron

require_megatron()

from miniverl_dist.backends.megatron.architecture import Architecture, read_architecture
from miniverl_dist.backends.megatron.hf_folder import CONFIG_FILE, INDEX_FILE, HFFolder
from miniverl_dist.backends.megatron.setup import MegatronModel, build_model
from miniverl_dist.backends.megatron.weights import export, is_stage_sender, load_hf, save_hf
from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.config.roles import MegatronModelConfig
from miniverl_dist.errors import CheckpointError
from tests.support.hf_models import (
    MODEL_TYPES,
    hf_logits,
    hf_tensors,
    tiny_architecture,
    write_hf_model,
)
from tests.support.layouts import FOUR_RANKS, TWO_RANKS, WORLDS
from tests.support.ranks import Rank, run_ranks

BUCKET_BYTES = 40_000
TOKENS = np.random.default_rng(0).integers(0, 97, (2, 16))
FITTING = [
    (model_type, name)
    for model_type in MODEL_TYPES
    for name, parallel in (TWO_RANKS | FOUR_RANKS).items()
    if tiny_architecture(model_type).problem(parallel) is None
]


class Sent(NamedTuple):
    """What a rank exported."""

    names: list[str]
    different: list[str]
    """Tensors that are not bit for bit those of the folder."""
    num_buckets: int
    largest_bucket_bytes: int
    is_sender: bool


Cases = dict[tuple[str, str], Sent]


def built(arch: Architecture, parallel: ParallelConfig, **fields: Any) -> MegatronModel:
    fields = {"config": Path("unused.json"), "parallel": parallel} | fields
    return build_model(arch, MegatronModelConfig(kind="megatron", **fields), seed=1)


def loaded(folder: Path, parallel: ParallelConfig, **fields: Any) -> MegatronModel:
    model = built(read_architecture(folder / CONFIG_FILE), parallel, **fields)
    load_hf(model, HFFolder(folder).read)
    return model


def sent_by(model: MegatronModel, stored: Mapping[str, torch.Tensor]) -> Sent:
    names, different, sizes = [], [], []
    for bucket in export(model, BUCKET_BYTES):
        names += list(bucket)
        different += [n for n, t in bucket.items() if not torch.equal(t, stored[n])]
        sizes.append(sum(tensor.nbytes for tensor in bucket.values()))
    return Sent(names, different, len(sizes), max(sizes), is_stage_sender())


def measure(
    rank: Rank, layouts: Mapping[str, ParallelConfig], folders: Mapping[str, Path]
) -> Cases:
    found: Cases = {}
    stored = {kind: hf_tensors(folder) for kind, folder in folders.items()}
    for model_type, name in FITTING:
        if name in layouts:
            with rank.layout(layouts[name]):
                model = loaded(folders[model_type], layouts[name])
                found[model_type, name] = sent_by(model, stored[model_type])
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Several shards each, as large models have."""
    root = tmp_path_factory.mktemp("hf")
    return {
        kind: write_hf_model(tiny_architecture(kind), root / kind, shard_size="100KB")
        for kind in MODEL_TYPES
    }


@pytest.fixture(scope="module")
def cases(folders: dict[str, Path]) -> list[Cases]:
    found: list[Cases] = []
    for world, layouts in WORLDS:
        found += run_ranks(world, measure, layouts, folders)
    return found


@pytest.mark.parametrize(("model_type", "layout"), FITTING)
def test_what_went_in_comes_out(
    cases: list[Cases], folders: dict[str, Path], model_type: str, layout: str
) -> None:
    sent = [case[model_type, layout] for case in cases if (model_type, layout) in case]
    assert [s.different for s in sent] == [[]] * len(sent)
    names = [name for s in sent for name in s.names]
    assert sorted(names) == sorted(hf_tensors(folders[model_type]))


@pytest.mark.parametrize(("model_type", "layout"), FITTING)
def test_ranks_walk_along_and_one_of_each_stage_sends(
    cases: list[Cases], model_type: str, layout: str
) -> None:
    sent = [case[model_type, layout] for case in cases if (model_type, layout) in case]
    stages = (TWO_RANKS | FOUR_RANKS)[layout].pipeline
    assert len({s.num_buckets for s in sent}) == 1
    assert sent[0].num_buckets > 3
    assert [bool(s.names) for s in sent] == [s.is_sender for s in sent]
    assert sum(s.is_sender for s in sent) == stages
    # At EP4 four experts' tensors of 12 kB go together.
    assert max(s.largest_bucket_bytes for s in sent) <= max(BUCKET_BYTES, 4 * 64 * 48 * 4)


def saved(rank: Rank, folder: Path, target: Path, parallel: ParallelConfig, dtype: Any) -> None:
    with rank.layout(parallel):
        save_hf(loaded(folder, parallel, dtype=dtype), target, bucket_bytes=BUCKET_BYTES)
        # Whoever returns may read at once.
        assert (target / CONFIG_FILE).is_file()
        assert (target / INDEX_FILE).is_file()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_transformers_loads_what_is_saved(
    folders: dict[str, Path], tmp_path: Path, model_type: str
) -> None:
    layout = FOUR_RANKS["TP2+SP+PP2"]
    run_ranks(4, saved, folders[model_type], tmp_path / "out", layout, "float32")
    assert read_architecture(tmp_path / "out" / CONFIG_FILE) == tiny_architecture(model_type)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 4
    found = hf_logits(tmp_path / "out", TOKENS)
    np.testing.assert_array_equal(found, hf_logits(folders[model_type], TOKENS))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_bfloat16_survives_too(tmp_path: Path, model_type: str) -> None:
    arch = tiny_architecture(model_type)
    folder = write_hf_model(arch, tmp_path / "in", dtype=torch.bfloat16)
    run_ranks(2, saved, folder, tmp_path / "out", TWO_RANKS["TP2+SP"], "bfloat16")
    wanted, found = hf_tensors(folder), hf_tensors(tmp_path / "out")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def fails_to_save(rank: Rank, folder: Path, target: Path) -> str:
    parallel = TWO_RANKS["PP2"]
    with rank.layout(parallel):
        model = loaded(folder, parallel)
        with pytest.raises(CheckpointError) as error:
            # The second stage cannot write there.
            save_hf(model, target / "blocked" if rank.rank else target, bucket_bytes=BUCKET_BYTES)
        return str(error.value)


def test_a_rank_that_cannot_write_fails_all(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file, not a folder")
    messages = run_ranks(2, fails_to_save, folders["qwen3"], tmp_path)
    assert messages[0] == messages[1]
    assert "rank 1" in messages[0]
    assert "blocked" in messages[0]


def load_errors(rank: Rank, folder: Path) -> tuple[str, bool]:
    """Offered a tensor of another shape, the last that is looked at."""
    arch = tiny_architecture("qwen3")
    with rank.layout(ParallelConfig()):
        model = built(arch, ParallelConfig())
        before = {n: p.detach().clone() for n, p in model.module.named_parameters()}
        tensors = hf_tensors(folder) | {"model.norm.weight": torch.zeros(65)}
        with pytest.raises(CheckpointError) as error:
            load_hf(model, tensors.__getitem__)
        same = all(torch.equal(p, before[n]) for n, p in model.module.named_parameters())
        return str(error.value), same


def test_a_wrong_shape_is_named_and_nothing_changes(folders: dict[str, Path]) -> None:
    [(message, is_unchanged)] = run_ranks(1, load_errors, folders["qwen3"])
    assert message == "weight 'model.norm.weight' has shape (65,), expected (64,)"
    assert is_unchanged
