"""Which rows of which Hugging Face tensors make up each of megatron's parameters; torch-free.

Every parameter of a rank is a run of slices of Hugging Face tensors, laid end to end along one
axis. That one description serves both ways: loading concatenates the slices, exporting cuts the
gathered parameters of all ranks apart and puts each slice back where it came from. Nothing is
computed on the way, so both are exact in every dtype.

What megatron packs together:

* ``linear_qkv``: for each key/value head its queries, (their gates,) its key, its value;
* ``linear_fc1``: gate, then up projection, each tensor rank's share of both;
* ``in_proj`` of a gated delta net: query, key, value, z, b, a, a share of each; ``conv1d``: query,
  key, value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from miniverl_dist.backends.megatron.architecture import (
    Architecture,
    LinearAttentionShape,
    hf_parameters,
)
from miniverl_dist.config.cluster import ParallelConfig


@dataclass(frozen=True)
class Slice:
    """``[start, stop)`` of a Hugging Face tensor along its parameter's axis."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True)
class Parameter:
    """One parameter of one rank."""

    name: str
    """Megatron's, with the layer's number within its stage."""
    slices: tuple[Slice, ...]
    axis: int = 0
    """Along which the slices lie end to end."""
    is_split: bool = False
    """The tensor ranks (the expert tensor ranks, for experts) hold different slices."""
    is_expert: bool = False
    """The expert ranks hold different tensors."""
    padding: int = 0
    """Rows of zeros behind the last slice that stand for no token."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The Hugging Face tensors it is made of, each once."""
        return tuple(dict.fromkeys(s.tensor for s in self.slices))

    def places(self, tensor: str) -> Iterator[tuple[Slice, int]]:
        """The slices of one tensor, each with the position in the parameter where it begins."""
        position = 0
        for part in self.slices:
            if part.tensor == tensor:
                yield part, position
            position += part.stop - part.start


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in the layout; data and context ranks hold equal weights."""

    pipeline: int = 0
    tensor: int = 0
    expert: int = 0
    expert_tensor: int = 0


@dataclass(frozen=True)
class Share:
    """The part of a dimension that one of ``count`` ranks holds."""

    rank: int
    count: int

    def of(self, tensor: str, size: int, start: int = 0) -> Slice:
        """This rank's part of rows ``[start, start + size)``."""
        part = size // self.count
        return Slice(tensor, start + self.rank * part, start + (self.rank + 1) * part)


def rank_parameters(
    arch: Architecture, parallel: ParallelConfig, at: Coordinates
) -> list[Parameter]:
    """Every parameter of a rank.

    Ranks of one stage list corresponding parameters at the same index; those of the experts stand
    for different experts under expert parallelism.
    """
    tensor = Share(at.tensor, parallel.tensor)
    per_stage = arch.num_layers // parallel.pipeline
    first = at.pipeline * per_stage
    is_last = at.pipeline == parallel.pipeline - 1
    found: list[Parameter] = []
    if at.pipeline == 0:
        found.append(
            _vocabulary("embedding.word_embeddings.weight", "model.embed_tokens", arch, tensor)
        )
    for index in range(per_stage):
        layer = _Layer(arch, first + index, f"decoder.layers.{index}.", tensor)
        found += layer.attention()
        found += layer.dense_mlp() if arch.experts is None else layer.mixture()
        if arch.experts is not None:
            found += layer.experts(
                Share(at.expert, parallel.expert), Share(at.expert_tensor, parallel.expert_tensor)
            )
    if is_last:
        norm = Slice("model.norm.weight", 0, arch.hidden_size)
        found.append(Parameter("decoder.final_layernorm.weight", (norm,)))
        # Tied weights: the one stage that has both keeps one; several keep equal copies.
        if not arch.tie_embeddings:
            found.append(_vocabulary("output_layer.weight", "lm_head", arch, tensor))
        elif parallel.pipeline > 1:
            found.append(_vocabulary("output_layer.weight", "model.embed_tokens", arch, tensor))
    return found


def _vocabulary(name: str, prefix: str, arch: Architecture, tensor: Share) -> Parameter:
    rows = -(-arch.vocab_size // tensor.count)
    start = min(tensor.rank * rows, arch.vocab_size)
    stop = min(start + rows, arch.vocab_size)
    slices = (Slice(f"{prefix}.weight", start, stop),)
    return Parameter(name, slices, is_split=True, padding=rows - (stop - start))


class _Layer:
    """The parameters of one decoder layer on one rank."""

    def __init__(self, arch: Architecture, number: int, prefix: str, tensor: Share) -> None:
        self.arch, self.tensor = arch, tensor
        self.hf = f"model.layers.{number}."
        self.prefix = prefix
        self.is_linear = arch.layer_kinds[number] == "linear_attention"

    def attention(self) -> Iterator[Parameter]:
        """Norm in front included."""
        hidden = self.arch.hidden_size
        first = "in_proj" if self.is_linear else "linear_qkv"
        norm = f"self_attention.{first}.layer_norm_weight"
        yield self.whole(norm, "input_layernorm.weight", hidden)
        if self.arch.linear is not None and self.is_linear:
            yield from self._delta_net(self.arch.linear)
        else:
            yield from self._self_attention()

    def _self_attention(self) -> Iterator[Parameter]:
        arch = self.arch
        yield self.split("self_attention.linear_qkv.weight", *self._query_key_value())
        out = self.tensor.of(f"{self.hf}self_attn.o_proj.weight", arch.num_heads * arch.head_dim)
        yield self.split("self_attention.linear_proj.weight", out, axis=1)
        for letter in "qk":
            name = f"self_attn.{letter}_norm.weight"
            yield self.whole(f"self_attention.{letter}_layernorm.weight", name, arch.head_dim)

    def _query_key_value(self) -> Iterator[Slice]:
        arch, dim = self.arch, self.arch.head_dim
        per_group = arch.num_heads // arch.num_kv_heads
        query, key, value = (f"{self.hf}self_attn.{letter}_proj.weight" for letter in "qkv")
        # A gated head's rows are its query and then its gate.
        stride = 2 * dim if arch.gated_attention else dim
        local = arch.num_kv_heads // self.tensor.count
        for group in range(self.tensor.rank * local, (self.tensor.rank + 1) * local):
            heads = range(group * per_group, (group + 1) * per_group)
            for offset in range(0, stride, dim):
                for head in heads:
                    start = head * stride + offset
                    yield Slice(query, start, start + dim)
            yield Slice(key, group * dim, (group + 1) * dim)
            yield Slice(value, group * dim, (group + 1) * dim)

    def _delta_net(self, linear: LinearAttentionShape) -> Iterator[Parameter]:
        name, heads = f"{self.hf}linear_attn.", linear.num_value_heads
        yield self.split(
            "self_attention.in_proj.weight",
            *self._query_key_value_sections(f"{name}in_proj_qkv.weight", linear),
            self.tensor.of(f"{name}in_proj_z.weight", linear.value_dim),
            self.tensor.of(f"{name}in_proj_b.weight", heads),
            self.tensor.of(f"{name}in_proj_a.weight", heads),
        )
        sections = self._query_key_value_sections(f"{name}conv1d.weight", linear)
        yield self.split("self_attention.conv1d.weight", *sections)
        for vector in ("A_log", "dt_bias"):
            yield self.split(f"self_attention.{vector}", self.tensor.of(f"{name}{vector}", heads))
        dim = linear.value_head_dim
        yield self.whole("self_attention.out_norm.weight", "linear_attn.norm.weight", dim)
        out = self.tensor.of(f"{name}out_proj.weight", linear.value_dim)
        yield self.split("self_attention.out_proj.weight", out, axis=1)

    def _query_key_value_sections(
        self, tensor: str, linear: LinearAttentionShape
    ) -> tuple[Slice, ...]:
        keys, values = linear.key_dim, linear.value_dim
        return (
            self.tensor.of(tensor, keys),
            self.tensor.of(tensor, keys, start=keys),
            self.tensor.of(tensor, values, start=2 * keys),
        )

    def dense_mlp(self) -> Iterator[Parameter]:
        """Norm in front included."""
        norm = "mlp.linear_fc1.layer_norm_weight"
        yield self.whole(norm, "post_attention_layernorm.weight", self.arch.hidden_size)
        yield from self._mlp("mlp.", "mlp.", self.arch.ffn_size)

    def mixture(self) -> Iterator[Parameter]:
        """Norm, router and shared expert: what the tensor ranks share."""
        hidden, experts = self.arch.hidden_size, self.arch.experts
        if experts is None:
            return
        yield self.whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden)
        yield self.whole("mlp.router.weight", "mlp.gate.weight", experts.num_experts)
        if experts.shared_ffn_size:
            yield from self._mlp(
                "mlp.shared_experts.", "mlp.shared_expert.", experts.shared_ffn_size
            )
            yield self.whole("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", 1)

    def experts(self, expert: Share, expert_tensor: Share) -> Iterator[Parameter]:
        """This expert rank's experts, those of one number side by side."""
        experts = self.arch.experts
        if experts is None:
            return
        local = experts.num_experts // expert.count
        for index in range(local):
            hf = f"{self.hf}mlp.experts.{expert.rank * local + index}."
            up, down = _gated_mlp(hf, experts.ffn_size, expert_tensor)
            for part, slices in (("linear_fc1", up), ("linear_fc2", (down,))):
                yield Parameter(
                    f"{self.prefix}mlp.experts.{part}.weight{index}",
                    slices,
                    axis=int(part == "linear_fc2"),
                    is_split=True,
                    is_expert=True,
                )

    def _mlp(self, name: str, hf: str, ffn: int) -> Iterator[Parameter]:
        up, down = _gated_mlp(f"{self.hf}{hf}", ffn, self.tensor)
        yield self.split(f"{name}linear_fc1.weight", *up)
        yield self.split(f"{name}linear_fc2.weight", down, axis=1)

    def whole(self, name: str, tensor: str, size: int) -> Parameter:
        """A parameter that every tensor rank has in full."""
        return Parameter(f"{self.prefix}{name}", (Slice(f"{self.hf}{tensor}", 0, size),))

    def split(self, name: str, *slices: Slice, axis: int = 0) -> Parameter:
        """A parameter of which every tensor rank has a part."""
        return Parameter(f"{self.prefix}{name}", slices, axis=axis, is_split=True)


def _gated_mlp(hf: str, ffn: int, share: Share) -> tuple[tuple[Slice, Slice], Slice]:
    """Slices of gate and up projection, and of the down projection (along axis 1)."""
    gate, up, down = (share.of(f"{hf}{part}_proj.weight", ffn) for part in ("gate", "up", "down"))
    return (gate, up), down


@dataclass(frozen=True)
class Unit:
    """What is gathered together: one Hugging Face tensor, or an expert's for every expert rank."""

    parameter: int
    """Index into ``rank_parameters``."""
    part: int
    """Index into the parameter's ``tensors``."""


def export_buckets(
    arch: Architecture, parallel: ParallelConfig, stage: int, *, itemsize: int, bucket_bytes: int
) -> list[list[Unit]]:
    """How one stage's parameters are sent, bucket by bucket.

    Args:
        arch: The decoder.
        parallel: Its layout.
        stage: Pipeline rank.
        itemsize: Bytes of one element.
        bucket_bytes: Of a bucket's Hugging Face tensors, gathered over the stage's ranks. A larger
            unit goes alone.
    """
    shapes = hf_parameters(arch)
    buckets: list[list[Unit]] = []
    filled = bucket_bytes
    for index, parameter in enumerate(rank_parameters(arch, parallel, Coordinates(stage))):
        for part, tensor in enumerate(parameter.tensors):
            # Tied weights of the last stage: sent by the first one already.
            if stage > 0 and tensor == "model.embed_tokens.weight":
                continue
            copies = parallel.expert if parameter.is_expert else 1
            size = itemsize * copies * prod(shapes[tensor])
            if filled + size > bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(Unit(index, part))
            filled += size
    return buckets
