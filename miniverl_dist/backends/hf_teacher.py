"""A teacher over the student's own backbone: its frozen weights, with an adapter or without one.

The backbone is in memory once. Which adapter takes part is chosen for the length of a pass, in the
thread that computes it, so that the teacher may score while the student is trained.

Shapes: P tokens of a text, n rows, H hidden size, V the tokenizer's ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miniverl_dist.backends.hf_adapters import TEACHER
from miniverl_dist.backends.hf_peft import read_adapter
from miniverl_dist.backends.hf_student import HFStudent
from miniverl_dist.config.roles import BackboneTeacherConfig, HFStudentConfig
from miniverl_dist.errors import CheckpointError, ConfigError, RequestRejectedError


class BackboneTeacher:
    """Implements ``lab.resident.TeacherModel`` and ``teacher_server.scorer.CausalLM``.

    It is made before the student, which others build around it, and answers from ``attach`` on.

    Args:
        config: Whose adapter.
        student: Of the recipe; its longest context is the teacher's.
        vocab_rows: Ids that the tokenizer has.

    Raises:
        ConfigError: the adapter's folder cannot be read.
    """

    def __init__(
        self, config: BackboneTeacherConfig, student: HFStudentConfig, vocab_rows: int
    ) -> None:
        self.vocab_size = vocab_rows
        self.max_context_tokens = student.max_context_tokens
        self._folder = config.adapter
        self._stored = None if config.adapter is None else read_adapter(config.adapter)
        self._student: HFStudent | None = None

    def attach(self, student: HFStudent) -> None:
        """Teach with this student's backbone from now on.

        Raises:
            ConfigError: its weights are trained themselves; an adapter of another model.
        """
        if student.adapters is None:
            raise ConfigError(
                "teacher.model.kind student_backbone: the student trains its whole weights, and "
                "the teacher would change with every step; add student.model.lora"
            )
        if self._stored is not None:
            try:
                student.adapters.add(TEACHER, *self._stored)
            except CheckpointError as error:
                raise ConfigError(f"teacher.model.adapter: {self._folder}: {error}") from error
        self._student = student
        self.max_context_tokens = student.model.max_context_tokens

    def rows(self, token_ids: Sequence[int]) -> Tensor:
        """[P] the ids themselves.

        Raises:
            RequestRejectedError: an id that the tokenizer does not have.
        """
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise RequestRejectedError(
                f"token ids from {min(token_ids)} to {max(token_ids)}, the model has "
                f"0 to {self.vocab_size - 1}"
            )
        return torch.tensor(token_ids, dtype=torch.int64)

    @torch.no_grad()
    def hidden(self, rows: Tensor) -> Tensor:
        """[P, H] states behind the final norm.

        Raises:
            BatchError: a text longer than the student's context.
        """
        student = self._attached
        assert student.adapters is not None
        role = None if self._stored is None else TEACHER
        with student.adapters.acting_as(role):
            return student.model.hidden(rows[None].to(student.model.device))[0]

    def ids(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids of rows: the rows themselves."""
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V]; the output projection has no adapter."""
        return hidden @ self._attached.model.head().T

    @property
    def _attached(self) -> HFStudent:
        if self._student is None:
            raise ConfigError("the teacher's backbone is the student's, which is not loaded yet")
        return self._student
