"""A student's checkpoint: what belongs to it, and the checks before any of it is taken up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miniverl_dist.backends.megatron.checkpoint import (
    agreed_failures,
    load_parameters,
    save_parameters,
)
from miniverl_dist.backends.megatron.optimizer_state import MOMENTS, Kind, OptimizerState
from miniverl_dist.backends.megatron.reference import FrozenWeights, copy_into
from miniverl_dist.backends.megatron.setup import MegatronModel
from miniverl_dist.backends.weights_io import (
    TokenizerIdentity,
    make_directory,
    read_json,
    write_json,
)
from miniverl_dist.config.roles import MegatronModelConfig
from miniverl_dist.errors import CheckpointError, TokenizerMismatchError

STUDENT_FILE = "student.json"
WEIGHTS, REFERENCE = "weights", "reference"


@dataclass(frozen=True)
class Counters:
    """How far a student has come."""

    policy_version: int
    num_updates: int
    num_optimizer_steps: int
    """Since the moments were last reset."""


class StudentFolder:
    """Writes and reads one student's checkpoints; all ranks together.

    Args:
        model: The model on this rank.
        config: Its layout, noted for the reader of a folder; another one may load it.
        tokenizer: Whose ids the student was trained on.
    """

    def __init__(
        self, model: MegatronModel, config: MegatronModelConfig, tokenizer: TokenizerIdentity
    ) -> None:
        self._model = model
        self._config = config
        self._tokenizer = tokenizer
        self._parameters: dict[str, Tensor] = dict(model.module.named_parameters())

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        # Masters hold bits that bfloat16 weights have lost; float32 weights are their own.
        return MOMENTS if self._config.dtype == "float32" else (*MOMENTS, "master")

    def save(
        self,
        directory: Path,
        counters: Counters,
        state: OptimizerState,
        reference: FrozenWeights | None,
    ) -> None:
        """Write everything below ``directory``; ``student.json`` comes last.

        Raises:
            CheckpointError: a file could not be written; on all ranks.
        """
        module = self._model.module
        with agreed_failures(f"cannot make {directory.name}"):
            if dist.get_rank() == 0:
                make_directory(directory)
        save_parameters(module, self._parameters, directory / WEIGHTS)
        if reference is not None:
            save_parameters(module, reference.tensors, directory / REFERENCE)
        for kind in self._kinds:
            save_parameters(module, state.whole(kind), directory / kind)
        with agreed_failures(f"cannot write {STUDENT_FILE}"):
            if dist.get_rank() == 0:
                write_json(directory / STUDENT_FILE, self._description() | asdict(counters))

    def load(
        self,
        directory: Path,
        policy_version: int,
        state: OptimizerState,
        reference: FrozenWeights | None,
    ) -> Counters:
        """Read everything, and only then change weights, reference and optimizer.

        Raises:
            CheckpointError: broken, of another architecture, or of another policy version.
            TokenizerMismatchError: trained on another tokenizer's ids.
        """
        found: Any = None
        with agreed_failures(f"cannot read {STUDENT_FILE}"):
            found = read_json(directory / STUDENT_FILE)
        counters = self._checked(found, policy_version)
        weights = self._read(directory / WEIGHTS)
        frozen = self._read(directory / REFERENCE) if reference is not None else None
        moments = {kind: self._read(directory / kind, torch.float32) for kind in self._kinds}
        copy_into(self._parameters, weights)
        if reference is not None and frozen is not None:
            reference.take(frozen)
        for kind, values in moments.items():
            state.take(kind, values)
        state.set_step(counters.num_optimizer_steps)
        return counters

    def _read(self, directory: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        dtypes = {name: dtype or tensor.dtype for name, tensor in self._parameters.items()}
        return load_parameters(self._model.module, dtypes, directory)

    def _description(self) -> dict[str, Any]:
        return {
            "architecture": self._model.arch.hf_config(),
            "dtype": self._config.dtype,
            "parallel": self._config.parallel.model_dump(mode="json"),
            "num_ranks": dist.get_world_size(),
            "tokenizer": asdict(self._tokenizer),
        }

    def _checked(self, found: Any, policy_version: int) -> Counters:  # noqa: ANN401 -- JSON
        wanted = self._description()
        try:
            tokenizer = TokenizerIdentity(**found["tokenizer"])
            counters = Counters(
                *(found[name] for name in ("policy_version", "num_updates", "num_optimizer_steps"))
            )
            if not all(type(value) is int for value in asdict(counters).values()):
                raise TypeError("a counter is no integer")  # noqa: TRY301 -- one error for all
            architecture, dtype = dict(found["architecture"]), found["dtype"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{STUDENT_FILE} is malformed: {error}") from error
        if tokenizer.fingerprint != self._tokenizer.fingerprint:
            raise TokenizerMismatchError(
                f"the checkpoint was trained on ids of {tokenizer.name} "
                f"({tokenizer.fingerprint[:12]}), this student holds {self._tokenizer.name} "
                f"({self._tokenizer.fingerprint[:12]})"
            )
        for name in sorted(architecture | wanted["architecture"]):
            there, here = architecture.get(name), wanted["architecture"].get(name)
            if there != here:
                raise CheckpointError(f"the checkpoint has {name} {there!r}, expected {here!r}")
        if dtype != wanted["dtype"]:
            raise CheckpointError(f"the checkpoint has dtype {dtype}, expected {wanted['dtype']}")
        if counters.policy_version != policy_version:
            raise CheckpointError(
                f"{STUDENT_FILE} is of policy version {counters.policy_version}, expected "
                f"{policy_version}: weights and run state belong to different commits"
            )
        return counters
