"""`miniverl-dist plan`: what a recipe will do to a cluster, before any of it is touched.

Counts of parameters, placement and ranks are exact; bytes are estimates whose formulas are in
docs/cluster.md. Needs neither torch nor Ray; what an installed package could check and is not
there is named. Reads the recipe, the tasks, tokenizers, and of models descriptions, never weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from actors.memory_estimate import (
    DTYPE_BYTES,
    GIB,
    MASTER_BYTES,
    MOMENT_BYTES,
    EngineMemory,
    RankMemory,
    StudentMemory,
    engine_memory,
    hf_note,
    longest_microbatch,
    longest_sequence,
)
from actors.placement import (
    FeasibilityReport,
    NodeResources,
    PlacementPlan,
    RankPlace,
    feasibility,
    placement_plan,
    rank_coordinates,
)
from actors.plan_notes import engine_load_text, recipe_notes
from actors.plan_phases import Phase, StudentCounts, phases
from actors.recipe_checks import CheckedRecipe, check_recipe
from actors.sharding import Sharding, num_buckets
from miniverl_dist.backends.megatron.architecture import Architecture, read_architecture
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.recipe import SGLangEngineConfig
from miniverl_dist.config.roles import (
    HFStudentConfig,
    MegatronModelConfig,
)
from miniverl_dist.errors import ConfigError, PlacementError

DEFAULT_GPU_GIB: Final = 80.0
DEFAULT_RESERVE_GIB: Final = 6.0
"""Left for the CUDA context, NCCL's buffers, workspaces and fragments: a choice, not a formula."""


_NODE: Final = re.compile(r"(?:(?!0+x)(\d{1,4})x)?(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Device:
    """The GPU that a plan is made for."""

    gpu_memory_gib: float = DEFAULT_GPU_GIB
    reserve_gib: float = DEFAULT_RESERVE_GIB

    def usable_bytes(self, gpus_per_rank: float) -> int:
        """For one rank; ranks that share a GPU share its memory."""
        share = min(gpus_per_rank, 1.0)
        return int((self.gpu_memory_gib - self.reserve_gib) * GIB * share)


@dataclass(frozen=True)
class Publish:
    """One publish of the weights to all engines."""

    transport: str
    total_bytes: int
    num_buckets: int
    """Rounds; the stages of a pipeline send side by side, the shorter ones empty buckets."""
    num_engines: int
    how: str
    moved_bytes: int
    """Over all links together, at most."""
    into_servers: str
    """How SGLang's servers get what their actors have received; empty for other engines."""


@dataclass(frozen=True)
class Plan:
    """All that can be said of a run beforehand."""

    name: str
    runtime: str
    placement: PlacementPlan
    fit: FeasibilityReport | None
    """None unless nodes were given."""
    ranks: tuple[RankPlace, ...]
    num_parameters: int | None
    num_active_parameters: int | None
    memory: tuple[RankMemory, ...]
    usable_bytes: int | None
    """Of one rank's GPU; None on CPUs."""
    engine: EngineMemory | None
    publish: Publish | None
    phases: tuple[Phase, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    def require(self) -> None:
        """Raise unless everything fits.

        Raises:
            PlacementError: every problem, one a line.
        """
        if self.problems:
            raise PlacementError("this run does not fit:\n" + "\n".join(self.problems))

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        data = asdict(self)
        data.pop("fit")
        data["memory"] = [asdict(m) | {"device_bytes": m.device_bytes} for m in self.memory]
        if self.fit is not None:
            data["nodes"] = [asdict(node) for node in self.fit.nodes]
            placed = [[*bundle, node] for bundle, node in self.fit.assignment.items()]
            data["assignment"] = placed
            data["missing"] = [list(bundle) for bundle in self.fit.missing]
        return data


def parse_nodes(texts: Sequence[str]) -> list[NodeResources]:
    """Nodes as written on a command line: ``CPUS,GPUS``, or ``Nx`` and that for N alike.

    Raises:
        ConfigError: another form.
    """
    found: list[NodeResources] = []
    for text in texts:
        match = _NODE.fullmatch(text)
        if match is None:
            raise ConfigError(f"--node {text!r}: expected CPUS,GPUS or NxCPUS,GPUS, as in 2x96,8")
        for _ in range(int(match[1] or 1)):
            found.append(NodeResources(str(len(found)), float(match[2]), float(match[3])))
    return found


def make_plan(
    config: RunConfig, *, device: Device | None = None, nodes: Sequence[NodeResources] = ()
) -> Plan:
    """Plan a run.

    Args:
        config: checked as a whole already.
        device: the GPU of ranks and engines; the default has 80 GiB.
        nodes: the cluster to place it on, if it is known.

    Raises:
        ConfigError: ``config.json`` cannot be read, or its model cannot be laid out so; what else
            ``check_recipe`` finds.
        TaskNotFoundError: a task that the environment does not have.
    """
    device, checked = device or Device(), check_recipe(config)
    placement = placement_plan(config)
    fit = feasibility(placement, nodes) if nodes else None
    model = config.student.model
    if isinstance(model, HFStudentConfig):
        return _assemble(config, checked, placement, fit, None, notes=(hf_note(config, model),))
    if not isinstance(model, MegatronModelConfig):
        note = "a toy student is sized by its vocabulary, which is known once the tasks are read"
        return _assemble(config, checked, placement, fit, None, notes=(note,))
    return _assemble(config, checked, placement, fit, _StudentPlan(config, model, device))


def _assemble(
    config: RunConfig,
    checked: CheckedRecipe,
    placement: PlacementPlan,
    fit: FeasibilityReport | None,
    student: _StudentPlan | None,
    notes: tuple[str, ...] = (),
) -> Plan:
    problems = [] if student is None else student.problems()
    if fit is not None and not fit.is_feasible:
        problems.append(f"the placement has no room\n{fit.table()}")
    return Plan(
        name=config.name,
        runtime=config.runtime,
        placement=placement,
        fit=fit,
        ranks=() if student is None else student.places,
        num_parameters=None if student is None else student.arch.num_parameters,
        num_active_parameters=None if student is None else student.arch.num_active_parameters,
        memory=() if student is None else student.memory,
        usable_bytes=None if student is None else student.usable_bytes,
        engine=None if student is None else student.engine,
        publish=None if student is None else student.publish(),
        phases=tuple(phases(config, checked.tasks, None if student is None else student.counts())),
        notes=(
            *checked.unchecked,
            *notes,
            *recipe_notes(config),
            *(() if student is None else student.notes()),
        ),
        problems=tuple(problems),
    )


class _StudentPlan:
    """A Megatron student on its ranks, and the engines that sample it."""

    def __init__(self, config: RunConfig, model: MegatronModelConfig, device: Device) -> None:
        self.config, self.model, self.device = config, model, device
        self.arch: Architecture = read_architecture(model.config)
        student = config.cluster.student
        self.places = rank_coordinates(
            model.parallel, config.num_student_ranks, student.ranks_per_node
        )
        self.sharding = Sharding(self.arch, model.parallel)
        estimate = StudentMemory(config, model, self.sharding, self.num_microbatches)
        self.memory = tuple(estimate.rank(place) for place in self.places)
        self.engine = engine_memory(config, model, self.arch)
        on_gpu = student.gpus_per_rank > 0 and config.runtime != "inprocess"
        self.usable_bytes = device.usable_bytes(student.gpus_per_rank) if on_gpu else None

    @property
    def data_parallel(self) -> int:
        """Replicas that share a batch."""
        return len(self.places) // self.model.parallel.model_ranks

    @property
    def num_microbatches(self) -> int:
        """Of one optimizer step and one replica, all sequences at full length."""
        loop = self.config.loop
        sequences = loop.num_groups * loop.group_size / loop.num_minibatches
        per_replica = -(-sequences // self.data_parallel)
        together = longest_microbatch(self.config, self.model) // longest_sequence(
            self.config, self.model
        )
        return int(-(-per_replica // together))

    @property
    def commit_bytes(self) -> int:
        """Weights, masters and moments once; the frozen reference where there is one."""
        size = DTYPE_BYTES[self.model.dtype]
        each = size + MOMENT_BYTES + (MASTER_BYTES if self.model.dtype != "float32" else 0)
        each += size if self.config.loss.kl_coef else 0
        return self.arch.num_parameters * each

    def publish(self) -> Publish:
        """Every tensor is sent once, by the first rank of its stage."""
        size = DTYPE_BYTES[self.model.dtype]
        stages = [
            {name: count * size for name, count in self.sharding.stage_tensors(pp).items()}
            for pp in range(self.model.parallel.pipeline)
        ]
        total = sum(sum(tensors.values()) for tensors in stages)
        setting = self.config.publish
        engines = self.engine.num_engines
        how, times = _TRANSPORTS[setting.transport]
        rounds = max(num_buckets(tensors, setting.bucket_bytes) for tensors in stages)
        moved = total * (engines + times)
        into_servers = engine_load_text(self.config, total)
        return Publish(setting.transport, total, rounds, engines, how, moved, into_servers)

    def counts(self) -> StudentCounts:
        """For the phases of a step."""
        sent = self.publish()
        return StudentCounts(
            num_microbatches=self.num_microbatches,
            data_parallel=self.data_parallel,
            publish_bytes=sent.total_bytes,
            num_buckets=sent.num_buckets,
            commit_bytes=self.commit_bytes,
        )

    def notes(self) -> Iterator[str]:
        """What a reader should know, though it is no fault."""
        if self.model.vocabulary == "restricted":
            yield (
                "vocabulary: restricted; sizes are those of config.json's vocab_size, the real "
                "number of rows is known once the tasks are read"
            )
        per_node = self.config.cluster.student.ranks_per_node
        parallel = self.model.parallel
        for name, size in (("tensor", parallel.tensor), ("expert", self._expert_span)):
            if size > 1 and per_node % size and len(self.places) > per_node:
                yield f"{name} groups of {size} ranks cross nodes of {per_node}: expect slow steps"
        if parallel.context > 1 and longest_sequence(self.config, self.model) % (
            2 * parallel.context
        ):
            yield f"sequences are padded to a multiple of {2 * parallel.context} for CP"

    @property
    def _expert_span(self) -> int:
        return self.model.parallel.expert * self.model.parallel.expert_tensor

    def problems(self) -> list[str]:
        """Everything that cannot fit."""
        return [*self._rank_problems(), *self._engine_problems(), *self._length_problems()]

    def _rank_problems(self) -> Iterator[str]:
        if self.usable_bytes is None:
            return
        worst = max(self.memory, key=lambda memory: memory.device_bytes)
        if worst.device_bytes > self.usable_bytes:
            yield (
                f"student: rank {worst.rank} needs about {worst.device_bytes / GIB:.1f} GiB "
                f"({_parts(worst)}), its GPU share has {self.usable_bytes / GIB:.1f} GiB after the "
                f"reserve of {self.device.reserve_gib:g} GiB: use more ranks, recompute: full, a "
                "smaller max_microbatch_tokens, or the distributed optimizer"
            )

    def _engine_problems(self) -> Iterator[str]:
        engine, asked = self.config.rollout.engine, self.config.cluster.rollout.gpus_per_actor
        if isinstance(engine, SGLangEngineConfig):
            if asked != engine.tensor:
                yield (
                    f"rollout.engine.tensor is {engine.tensor}, but cluster.rollout."
                    f"gpus_per_actor is {asked:g}: an SGLang actor needs one GPU per tensor rank"
                )
            limit = int(self.device.gpu_memory_gib * GIB * engine.mem_fraction_static)
            needed, what = self.engine.weights_bytes + self.engine.request_bytes, "one request"
        elif asked > 0:
            limit = self.device.usable_bytes(asked)
            needed, what = self.engine.full_bytes, f"{self.engine.requests} requests"
        else:
            return
        if needed > limit:
            yield (
                f"rollout engine: weights {self.engine.weights_bytes / GIB:.1f} GiB and the cache "
                f"of {what} of {self.engine.context_tokens} tokens need {needed / GIB:.1f} GiB a "
                f"GPU, there are {limit / GIB:.1f} GiB: use more GPUs per engine, fewer slots or "
                "a shorter context"
            )

    def _length_problems(self) -> Iterator[str]:
        if longest_sequence(self.config, self.model) > self.arch.max_positions:
            yield (
                f"episodes of {longest_sequence(self.config, self.model)} tokens exceed "
                f"max_position_embeddings {self.arch.max_positions} of {self.model.config}"
            )


_TRANSPORTS: Final = {
    "object_store": ("into Ray's shared memory once, from there to each engine", 1),
    "disk": ("written once below the run directory, read by each engine", 1),
    "broadcast": ("rank 0 of each stage to all engines in one group", 0),
}


def _parts(memory: RankMemory) -> str:
    parts = {
        "weights": memory.weights_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activation_bytes,
        "logits": memory.logits_bytes,
    }
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
