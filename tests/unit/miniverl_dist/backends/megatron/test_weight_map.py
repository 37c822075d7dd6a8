"""The weight map as a description: nothing is missed, nothing held twice, buckets are full."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniverl_dist.backends.megatron.architecture import Architecture, hf_parameters
from miniverl_dist.backends.megatron.weight_map import (
    Coordinates,
    Parameter,
    Unit,
    export_buckets,
    rank_parameters,
)
from miniverl_dist.config.cluster import ParallelConfig
from tests.support.hf_models import MODEL_TYPES, tiny_architecture


def layouts(arch: Architecture) -> list[ParallelConfig]:
    """Every small layout that fits."""
    sizes = itertools.product((1, 2), (1, 2, 4), (1, 2, 4), (1, 2))
    found = [
        ParallelConfig(
            tensor=tensor, pipeline=pipeline, expert=expert, expert_tensor=part, sequence=tensor > 1
        )
        for tensor, pipeline, expert, part in sizes
    ]
    return [layout for layout in found if arch.problem(layout) is None]


def holders(arch: Architecture, layout: ParallelConfig) -> list[Parameter]:
    """What all ranks hold, dense parameters from the dense ranks and experts from theirs."""
    found: list[Parameter] = []
    for stage in range(layout.pipeline):
        for tensor in range(layout.tensor):
            at = Coordinates(pipeline=stage, tensor=tensor)
            found += [p for p in rank_parameters(arch, layout, at) if not p.is_expert]
        for expert, part in itertools.product(range(layout.expert), range(layout.expert_tensor)):
            at = Coordinates(stage, 0, expert, part)
            found += [p for p in rank_parameters(arch, layout, at) if p.is_expert]
    return found


CASES = [(kind, layout) for kind in MODEL_TYPES for layout in layouts(tiny_architecture(kind))]


@pytest.mark.parametrize(("model_type", "layout"), CASES)
def test_every_row_has_its_holders(model_type: str, layout: ParallelConfig) -> None:
    """Split tensors: one holder a row. Whole ones: all tensor ranks. Tied: both end stages."""
    arch = tiny_architecture(model_type)
    shapes = hf_parameters(arch)
    counts: dict[str, np.ndarray] = {}
    expected: dict[str, int] = {}
    for parameter in holders(arch, layout):
        for part in parameter.slices:
            shape = shapes[part.tensor]
            count = counts.setdefault(part.tensor, np.zeros(shape[parameter.axis], dtype=int))
            count[part.start : part.stop] += 1
            expected[part.tensor] = 1 if parameter.is_split else layout.tensor
    if arch.tie_embeddings and layout.pipeline > 1:
        expected["model.embed_tokens.weight"] = 2
    assert counts.keys() == shapes.keys()
    assert {name: set(count.tolist()) for name, count in counts.items()} == {
        name: {number} for name, number in expected.items()
    }


def test_gated_heads_come_queries_first() -> None:
    """Four heads in two groups of one tensor rank each; a head's 32 rows: query, then gate."""
    arch = tiny_architecture("qwen3_5_moe")
    layout = ParallelConfig(tensor=2, sequence=True)
    found = rank_parameters(arch, layout, Coordinates(tensor=1))
    [qkv] = [p for p in found if p.name == "decoder.layers.3.self_attention.linear_qkv.weight"]
    prefix = "model.layers.3.self_attn."
    assert [(s.tensor.removeprefix(prefix), s.start, s.stop) for s in qkv.slices] == [
        ("q_proj.weight", 64, 80),
        ("q_proj.weight", 96, 112),
        ("q_proj.weight", 80, 96),
        ("q_proj.weight", 112, 128),
        ("k_proj.weight", 16, 32),
        ("v_proj.weight", 16, 32),
    ]


def test_a_delta_net_shares_out_every_section() -> None:
    arch = tiny_architecture("qwen3_5_moe")
    layout = ParallelConfig(tensor=2, sequence=True)
    found = rank_parameters(arch, layout, Coordinates(tensor=1))
    [projection] = [p for p in found if p.name == "decoder.layers.0.self_attention.in_proj.weight"]
    prefix = "model.layers.0.linear_attn.in_proj_"
    assert [(s.tensor.removeprefix(prefix), s.start, s.stop) for s in projection.slices] == [
        ("qkv.weight", 16, 32),
        ("qkv.weight", 48, 64),
        ("qkv.weight", 96, 128),
        ("z.weight", 32, 64),
        ("b.weight", 4, 8),
        ("a.weight", 4, 8),
    ]


def test_an_odd_vocabulary_is_padded_on_the_last_rank() -> None:
    arch = tiny_architecture("qwen3", vocab_size=97)
    layout = ParallelConfig(tensor=2)
    first, last = (rank_parameters(arch, layout, Coordinates(tensor=rank))[0] for rank in (0, 1))
    assert [(s.start, s.stop) for p in (first, last) for s in p.slices] == [(0, 49), (49, 97)]
    assert (first.padding, last.padding) == (0, 1)


@given(case=st.sampled_from(CASES), bucket_bytes=st.integers(1, 300_000))
def test_buckets_hold_everything_once_and_no_more_than_fits(
    case: tuple[str, ParallelConfig], bucket_bytes: int
) -> None:
    model_type, layout = case
    arch = tiny_architecture(model_type)
    shapes = hf_parameters(arch)
    sent: list[str] = []
    for stage in range(layout.pipeline):
        peers = [
            rank_parameters(arch, layout, Coordinates(stage, 0, expert))
            for expert in range(layout.expert)
        ]
        for bucket in export_buckets(arch, layout, stage, itemsize=2, bucket_bytes=bucket_bytes):
            names = [tensors_of(unit, peers) for unit in bucket]
            sent += [name for unit in names for name in unit]
            size = sum(2 * prod(shapes[name]) for unit in names for name in unit)
            assert bucket
            assert size <= bucket_bytes or len(bucket) == 1
    assert sorted(sent) == sorted(shapes)


def tensors_of(unit: Unit, peers: list[list[Parameter]]) -> list[str]:
    """The Hugging Face tensors that a unit gathers."""
    parameters = [peer[unit.parameter] for peer in peers]
    if not parameters[0].is_expert:
        parameters = parameters[:1]
    return [parameter.tensors[unit.part] for parameter in parameters]


def test_small_tensors_share_a_bucket() -> None:
    arch = tiny_architecture("qwen3")
    [everything] = export_buckets(
        arch, ParallelConfig(), 0, itemsize=4, bucket_bytes=4 * arch.num_parameters
    )
    assert len(everything) == len(hf_parameters(arch))
