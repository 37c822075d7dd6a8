"""Where a run's parts live: parallelism of the student, placement of the pools, publishing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from miniverl_dist.config.base import (
    ConfigModel,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

Runtime = Literal["inprocess", "single_actor", "cluster"]


class ParallelConfig(ConfigModel):
    """How a Megatron student is split over its ranks; data parallelism takes what is left."""

    tensor: PositiveInt = 1
    """TP: matrices are split over this many ranks."""
    pipeline: PositiveInt = 1
    """PP: layers are split over this many stages."""
    context: PositiveInt = 1
    """CP: sequences are split over this many ranks."""
    expert: PositiveInt = 1
    """EP: experts are split over this many ranks."""
    expert_tensor: PositiveInt = 1
    """ETP: matrices of one expert are split over this many ranks."""
    sequence: bool = False
    """SP: activations between the split matrices are split along the sequence; needs TP."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the dense weights."""
        return self.tensor * self.pipeline * self.context

    def problem(self, num_ranks: int) -> str | None:
        """Why ``num_ranks`` ranks cannot be laid out so; None when they can."""
        expert_ranks = self.expert * self.expert_tensor * self.pipeline
        if num_ranks % self.model_ranks:
            return (
                f"{num_ranks} ranks do not divide by tensor * pipeline * context = "
                f"{self.model_ranks}"
            )
        if num_ranks % expert_ranks:
            return (
                f"{num_ranks} ranks do not divide by expert * expert_tensor * pipeline = "
                f"{expert_ranks}"
            )
        if self.sequence and self.tensor == 1:
            return "sequence: true splits over the tensor ranks, but tensor is 1"
        return None


class StudentPlacement(ConfigModel):
    """Ranks of the student pool; each is one Ray actor."""

    num_nodes: PositiveInt = 1
    ranks_per_node: PositiveInt = 1
    """Ranks of one node share its placement bundle: tensor and expert groups stay on a node."""
    cpus_per_rank: NonNegativeFloat = 1.0
    gpus_per_rank: NonNegativeFloat = 0.0

    @property
    def num_ranks(self) -> int:
        """World size of the student."""
        return self.num_nodes * self.ranks_per_node


class ActorPlacement(ConfigModel):
    """Actors of a pool that are placed one by one, wherever they fit."""

    num_actors: PositiveInt = 1
    cpus_per_actor: NonNegativeFloat = 1.0
    gpus_per_actor: NonNegativeFloat = 0.0


class ClusterConfig(ConfigModel):
    """The Ray cluster and what is placed on it (``runtime: single_actor | cluster``)."""

    address: str = "local"
    """``local`` starts a cluster of this machine and ends it with the run; ``auto`` or an address
    joins one. A job submitted to a cluster always uses that cluster."""
    num_cpus: PositiveInt | None = None
    """CPUs that a ``local`` cluster offers; None takes the machine's."""
    min_nodes: PositiveInt = 1
    """Nodes to wait for before anything is placed."""
    start_deadline_s: PositiveFloat = 600.0
    """For the nodes to join, the placement to be granted, and every actor to be ready."""
    max_restarts: NonNegativeInt = 3
    """Restarts of each pool within ``restart_window_s``, failed starts included. Beyond it a lost
    student ends the run, and a lost engine or teacher server stays away."""
    restart_window_s: PositiveFloat = 3600.0
    student: StudentPlacement = StudentPlacement()
    rollout: ActorPlacement = ActorPlacement()
    teacher: ActorPlacement = ActorPlacement()
    """Servers of a teacher that the run launches itself (``teacher.model``)."""


class PublishConfig(ConfigModel):
    """How weights reach the rollout engines (``runtime: cluster``)."""

    transport: Literal["object_store", "disk", "broadcast"] = "object_store"
    """``object_store``: numpy buckets through shared memory; ``disk``: safetensors in the run
    directory, which all nodes must share; ``broadcast``: a gloo or nccl group."""
    bucket_bytes: Annotated[int, Field(ge=1024)] = 256 * 1024 * 1024
    """Weights in flight at a time; no rank ever gathers more."""
