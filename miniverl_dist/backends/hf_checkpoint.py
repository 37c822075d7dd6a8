"""What an hf student's checkpoint holds; safetensors and JSON, nothing that could run.

With LoRA only the adapters are stored: the folder that the student was loaded from is named by its
checksum, and a checkpoint over another one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from torch import Tensor

from miniverl_dist.backends.hf_optimizer import MasterAdamW
from miniverl_dist.backends.hf_student import HFStudent
from miniverl_dist.backends.tensors import as_numpy
from miniverl_dist.backends.weights_io import (
    TokenizerIdentity,
    make_directory,
    read_bytes,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from miniverl_dist.errors import CheckpointError, TokenizerMismatchError

STUDENT_FILE = "student.json"
WEIGHTS_FILE = "weights.safetensors"
ADAPTER_FILE = "adapter.safetensors"
REFERENCE_FILE = "reference.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
_COUNTERS = ("policy_version", "num_updates", "num_optimizer_steps")


@dataclass(frozen=True)
class Counters:
    """How far a student has come."""

    policy_version: int
    num_updates: int
    num_optimizer_steps: int
    """Since the moments were last reset."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint that has been read as a whole and found to fit."""

    counters: Counters
    weights: Mapping[str, Tensor]
    reference: Mapping[str, Tensor]
    moments: Mapping[str, NDArray[Any]]


class HFCheckpoint:
    """Writes and reads one student's checkpoints.

    Args:
        student: Whose.
        tokenizer: Whose ids it was trained on.
        base_sha256: Of the folder it was loaded from.
    """

    def __init__(
        self,
        student: HFStudent,
        tokenizer: TokenizerIdentity,
        base_sha256: str,
    ) -> None:
        self._student = student
        self._tokenizer = tokenizer
        self._base_sha256 = base_sha256

    def save(
        self, directory: Path, optimizer: MasterAdamW, policy_version: int, num_updates: int
    ) -> None:
        """Write everything below ``directory``; ``student.json`` comes last.

        Raises:
            CheckpointError: a file could not be written.
        """
        make_directory(directory)
        write_tensors(directory / self._weights_file, _arrays(self._student.trained))
        if self._student.has_reference:
            write_tensors(directory / REFERENCE_FILE, _arrays(self._student.reference))
        write_tensors(directory / OPTIMIZER_FILE, optimizer.state())
        counters = Counters(policy_version, num_updates, optimizer.num_steps)
        write_json(directory / STUDENT_FILE, self._description() | asdict(counters))

    def read(self, directory: Path, policy_version: int) -> Stored:
        """Read everything; the student is left as it is.

        Raises:
            CheckpointError: broken, of another architecture, or of another policy version.
            TokenizerMismatchError: trained on another tokenizer's ids.
        """
        counters, weights = self.read_actor(directory, policy_version)
        reference: dict[str, Tensor] = {}
        if self._student.has_reference:
            reference = _read_weights(directory / REFERENCE_FILE)
            self._student.check(reference)
        return Stored(counters, weights, reference, read_tensors(directory / OPTIMIZER_FILE))

    def read_actor(
        self, directory: Path, policy_version: int
    ) -> tuple[Counters, Mapping[str, Tensor]]:
        """Read counters and the actor's weights or adapter, which fit; see ``read``."""
        counters = self._checked(read_json(directory / STUDENT_FILE), policy_version)
        weights = _read_weights(directory / self._weights_file)
        self._student.check(weights)
        return counters, weights

    def take(self, stored: Stored, optimizer: MasterAdamW) -> None:
        """Become what was stored; all of it, or nothing.

        Raises:
            CheckpointError: the optimizer's state does not fit.
        """
        optimizer.restore(stored.moments, stored.counters.num_optimizer_steps)
        self._student.take(stored.weights)
        if self._student.has_reference:
            self._student.take_reference(stored.reference)

    @property
    def _weights_file(self) -> str:
        return WEIGHTS_FILE if self._student.adapters is None else ADAPTER_FILE

    def _description(self) -> dict[str, Any]:
        config = self._student.model.config
        lora = None if config.lora is None else config.lora.model_dump(mode="json")
        return {
            "architecture": self._student.model.architecture,
            "dtype": config.dtype,
            "lora": lora,
            "quantization": config.quantization,
            "base_sha256": self._base_sha256 if lora is not None else None,
            "tokenizer": asdict(self._tokenizer),
        }

    def _checked(self, found: Any, policy_version: int) -> Counters:  # noqa: ANN401 -- JSON
        wanted = self._description()
        try:
            tokenizer = TokenizerIdentity(**found["tokenizer"])
            counts = [found[name] for name in _COUNTERS]
            there = {name: found[name] for name in wanted if name != "tokenizer"}
            architecture = dict(there["architecture"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{STUDENT_FILE} is malformed: {error}") from error
        if not all(type(count) is int for count in counts):
            raise CheckpointError(f"{STUDENT_FILE} needs the integers {', '.join(_COUNTERS)}")
        if tokenizer.fingerprint != self._tokenizer.fingerprint:
            raise TokenizerMismatchError(
                f"the checkpoint was trained on ids of {tokenizer.name} "
                f"({tokenizer.fingerprint[:12]}), this student holds {self._tokenizer.name} "
                f"({self._tokenizer.fingerprint[:12]})"
            )
        here = wanted["architecture"]
        for name in sorted(architecture.keys() | here.keys()):
            if architecture.get(name) != here.get(name):
                raise CheckpointError(
                    f"the checkpoint has {name} {architecture.get(name)!r}, expected "
                    f"{here.get(name)!r}"
                )
        for name, value in there.items():
            if name != "architecture" and value != wanted[name]:
                raise CheckpointError(f"the checkpoint has {name} {value}, expected {wanted[name]}")
        if counts[0] != policy_version:
            raise CheckpointError(
                f"{STUDENT_FILE} is of policy version {counts[0]}, expected {policy_version}: "
                "weights and run state belong to different commits"
            )
        return Counters(*counts)


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: as_numpy(tensor) for name, tensor in tensors.items()}


def _read_weights(path: Path) -> dict[str, Tensor]:
    """As torch tensors: safetensors has no bfloat16 for numpy."""
    try:
        tensors: dict[str, Tensor] = parse_safetensors(read_bytes(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path.name}: not a complete safetensors file: {error}") from error
    return tensors
