"""Estimates of memory, from the recipe and ``config.json`` alone; formulas in docs/cluster.md.

Shapes: C columns of one rank's microbatch (padded tokens / CP), h hidden size. All in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from actors.hf_files import read_hf_files
from actors.placement import RankPlace
from actors.sharding import RankParameters, Sharding
from miniverl_dist.backends.megatron.architecture import Architecture
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.recipe import HFEngineConfig, SGLangEngineConfig
from miniverl_dist.config.roles import HFStudentConfig, MegatronModelConfig

GIB: Final = 2**30
DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES: Final = 4
"""Gradients are summed in float32 whatever the weights are."""
MOMENT_BYTES: Final = 8
"""Two float32 moments of Adam."""
MASTER_BYTES: Final = 4
"""A float32 copy of each weight that is not float32 itself."""
STATE_BYTES: Final = 4
"""Engines keep the state of gated delta nets in float32."""


def size_text(num_bytes: int) -> str:
    """Three digits and a unit."""
    for size, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return str(num_bytes)


@dataclass(frozen=True)
class RankMemory:
    """What one rank needs on its device, and beside it in the node's memory."""

    rank: int
    parameters: RankParameters
    weights_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    logits_bytes: int
    host_bytes: int
    """Frozen reference policy, and the own weights while it takes their place."""

    @property
    def device_bytes(self) -> int:
        """All but ``host_bytes``."""
        return (
            self.weights_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.logits_bytes
        )


@dataclass(frozen=True)
class LayerActivations:
    """Elements that one layer keeps for its backward pass, per column, by how they are split."""

    sequence: int
    """Split by SP only."""
    tensor: int
    """Split by TP."""
    routed: int
    """Copies of tokens on their way through the experts; balanced routing."""


def layer_activations(arch: Architecture, layer: int, expert_tensor: int = 1) -> LayerActivations:
    """Inputs of the two norms and of attention and MLP, projections, outputs before each product.

    Source:
        The counting of Korthikanti et al., arXiv:2205.05198, section 4, without dropout, for
        gated MLPs, grouped queries, gated delta nets and experts.
    """
    kind = arch.layer_kinds[layer]
    attention = _full_attention(arch) if kind == "full_attention" else _linear_attention(arch)
    if arch.experts is None:
        return LayerActivations(4 * arch.hidden_size, attention + 3 * arch.ffn_size, 0)
    experts = arch.experts
    per_copy = 2 * arch.hidden_size * expert_tensor + 3 * experts.ffn_size
    return LayerActivations(
        sequence=4 * arch.hidden_size + experts.num_experts,
        tensor=attention + 3 * experts.shared_ffn_size,
        routed=experts.experts_per_token * per_copy,
    )


def _full_attention(arch: Architecture) -> int:
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    gate = 2 * queries if arch.gated_attention else 0
    return 2 * queries + 2 * keys + gate


def _linear_attention(arch: Architecture) -> int:
    if arch.linear is None:
        return 0
    channels = 2 * arch.linear.key_dim + arch.linear.value_dim
    return 2 * channels + 3 * arch.linear.value_dim + 2 * arch.linear.num_value_heads


class StudentMemory:
    """Memory of every rank of a Megatron student.

    Args:
        config: the run; its student is a Megatron model.
        model: ``config.student.model``.
        sharding: its weights under its layout.
        num_microbatches: of one optimizer step and one data-parallel replica.
    """

    def __init__(
        self,
        config: RunConfig,
        model: MegatronModelConfig,
        sharding: Sharding,
        num_microbatches: int,
    ) -> None:
        self._config = config
        self._model = model
        self._sharding = sharding
        self._num_microbatches = num_microbatches
        self._dtype_bytes = DTYPE_BYTES[model.dtype]
        parallel, num_ranks = model.parallel, config.num_student_ranks
        self._dense_copies = num_ranks // (parallel.tensor * parallel.pipeline)
        self._expert_copies = num_ranks // (
            parallel.expert * parallel.expert_tensor * parallel.pipeline
        )
        self._columns = -(-longest_microbatch(config, model) // parallel.context)
        self._by_cell: dict[tuple[int, int], RankParameters] = {}

    def rank(self, place: RankPlace) -> RankMemory:
        """The estimate for one rank."""
        key = place.pp, place.ep
        if key not in self._by_cell:
            self._by_cell[key] = self._sharding.rank(place)
        found = self._by_cell[key]
        weights = found.total * self._dtype_bytes
        return RankMemory(
            rank=place.rank,
            parameters=found,
            weights_bytes=weights,
            gradient_bytes=found.total * GRADIENT_BYTES,
            optimizer_bytes=self._optimizer(found),
            activation_bytes=self._activations(place.pp),
            logits_bytes=self._logits(place.pp),
            host_bytes=2 * weights if self._config.loss.kl_coef else 0,
        )

    def _optimizer(self, found: RankParameters) -> int:
        each = MOMENT_BYTES + (MASTER_BYTES if self._model.dtype != "float32" else 0)
        if not self._model.distributed_optimizer:
            return each * found.total
        dense = -(-found.dense // self._dense_copies)
        return each * (dense + -(-found.expert // self._expert_copies))

    def _activations(self, stage: int) -> int:
        """Stage p starts PP - p microbatches before it finishes the first (1F1B)."""
        parallel, arch = self._model.parallel, self._sharding.arch
        first = stage * self._sharding.layers_per_stage
        layers = range(first, first + self._sharding.layers_per_stage)
        full = [self._layer(layer) for layer in layers]
        in_flight = min(parallel.pipeline - stage, self._num_microbatches)
        scores = self._scores()
        if self._model.recompute == "full":
            inputs = len(full) * arch.hidden_size * self._columns // self._sequence_ranks
            return in_flight * inputs * self._dtype_bytes + max(full) + scores
        if self._model.recompute == "selective":
            return in_flight * sum(full) + scores
        num_full = sum(arch.layer_kinds[layer] == "full_attention" for layer in layers)
        return in_flight * (sum(full) + num_full * scores)

    @property
    def _sequence_ranks(self) -> int:
        return self._model.parallel.tensor if self._model.parallel.sequence else 1

    def _layer(self, layer: int) -> int:
        parallel = self._model.parallel
        found = layer_activations(self._sharding.arch, layer, parallel.expert_tensor)
        elements = self._columns * (found.sequence + found.routed) // self._sequence_ranks
        elements += self._columns * found.tensor // parallel.tensor
        return elements * self._dtype_bytes

    def _scores(self) -> int:
        """Scores and probabilities of one layer, where no fused attention avoids them (CPU)."""
        if self._config.cluster.student.gpus_per_rank:
            return 0
        length = longest_sequence(self._config, self._model)
        heads = self._sharding.arch.num_heads // self._model.parallel.tensor
        return 2 * heads * self._columns * length * self._dtype_bytes

    def _logits(self, stage: int) -> int:
        """Last stage only.

        A chunk of float32 logits and of their gradient, the head's gradient until it is added to
        the sums, and the hidden states with theirs.
        """
        parallel, arch = self._model.parallel, self._sharding.arch
        if stage != parallel.pipeline - 1:
            return 0
        rows = -(-arch.vocab_size // parallel.tensor)
        chunk = 2 * self._config.loss.chunk_size * rows * 4
        head = rows * arch.hidden_size * (4 + self._dtype_bytes)
        return chunk + head + 2 * self._columns * arch.hidden_size * self._dtype_bytes


def longest_sequence(config: RunConfig, model: MegatronModelConfig) -> int:
    """Tokens of the longest episode."""
    return min(config.rollout.max_context_tokens, model.max_context_tokens)


def longest_microbatch(config: RunConfig, model: MegatronModelConfig) -> int:
    """Padded tokens of the largest microbatch: a longer sequence gets one of its own."""
    return max(model.max_microbatch_tokens, longest_sequence(config, model))


@dataclass(frozen=True)
class EngineMemory:
    """One rollout engine, per GPU (per process for ``hf`` on a CPU)."""

    kind: str
    num_engines: int
    num_devices: int
    """GPUs that one engine splits its weights over."""
    weights_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_request: int
    """Of the gated delta nets, whatever the length."""
    requests: int
    """At once, by config."""
    context_tokens: int

    @property
    def request_bytes(self) -> int:
        """One request at full length."""
        return self.kv_bytes_per_token * self.context_tokens + self.state_bytes_per_request

    @property
    def full_bytes(self) -> int:
        """All requests at full length: what an engine without paging needs."""
        return self.weights_bytes + self.requests * self.request_bytes


def engine_memory(
    config: RunConfig, model: MegatronModelConfig, arch: Architecture
) -> EngineMemory:
    """Weights and cache of the engine that samples this student."""
    engine = config.rollout.engine or HFEngineConfig(kind="hf")
    if isinstance(engine, SGLangEngineConfig):
        devices, requests = engine.tensor, engine.max_running_requests
    else:
        devices, requests = 1, engine.batch_slots
    size = DTYPE_BYTES[model.dtype]
    num_full = arch.layer_kinds.count("full_attention")
    heads = -(-arch.num_kv_heads // devices)
    return EngineMemory(
        kind=engine.kind,
        num_engines=config.cluster.rollout.num_actors,
        num_devices=devices,
        weights_bytes=-(-arch.num_parameters // devices) * size,
        kv_bytes_per_token=2 * num_full * heads * arch.head_dim * size,
        state_bytes_per_request=-(-_states(arch, size) // devices),
        requests=requests,
        context_tokens=longest_sequence(config, model),
    )


def _states(arch: Architecture, dtype_bytes: int) -> int:
    if arch.linear is None:
        return 0
    linear = arch.linear
    matrix = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim * STATE_BYTES
    channels = 2 * linear.key_dim + linear.value_dim
    window = channels * (linear.conv_kernel - 1) * dtype_bytes
    return arch.layer_kinds.count("linear_attention") * (matrix + window)


QUANTIZED_BYTES: Final[Mapping[str, float]] = {"int8": 1.0, "nf4": 0.5}
"""Per weight, without the scales."""


def hf_student_bytes(config: RunConfig, model: HFStudentConfig) -> int:
    """Weights, gradients, optimizer and reference of an hf student, before any activation.

    Raises:
        ConfigError: the folder holds no such model.
    """
    files = read_hf_files(model.path)
    size, trained = DTYPE_BYTES[model.dtype], files.num_trained(model)
    weights = files.num_parameters * QUANTIZED_BYTES.get(model.quantization, size)
    each = GRADIENT_BYTES + MOMENT_BYTES
    if model.lora is not None:
        each += MASTER_BYTES  # adapters are float32
    elif model.dtype != "float32":
        each += MASTER_BYTES
    reference = 0
    if config.loss.kl_coef:
        reference = trained * (MASTER_BYTES if model.lora is not None else size)
    return int(weights) + trained * each + reference


def hf_note(config: RunConfig, model: HFStudentConfig) -> str:
    """What can be said of an hf student's size from its files.

    Raises:
        ConfigError: the folder holds no such model.
    """
    files = read_hf_files(model.path)
    engine = files.num_parameters * DTYPE_BYTES[model.dtype]
    return (
        f"hf student {model.path.name}: {files.num_parameters:,} weights, of which "
        f"{files.num_trained(model):,} numbers are trained; about "
        f"{size_text(hf_student_bytes(config, model))} for weights, gradients, optimizer and "
        f"reference, {size_text(engine)} for its engine on the same device, and activations and "
        "caches beside them"
    )
