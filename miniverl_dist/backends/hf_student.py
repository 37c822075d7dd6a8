"""Who acts with a transformers model: the trained actor, and the policy that it started from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from miniverl_dist.backends.hf_adapters import ACTOR, REFERENCE, LoraAdapters
from miniverl_dist.backends.hf_model import HFModel, Named, load_module
from miniverl_dist.backends.tensors import first_difference
from miniverl_dist.config.roles import HFStudentConfig
from miniverl_dist.errors import CheckpointError


class HFStudent:
    """One model and its roles.

    With LoRA, actor and reference are two adapters over one set of weights, and a teacher may be a
    third (``hf_teacher``). Without it the
    reference is a second set in CPU memory, which the forward pass is handed when it is asked for;
    the actor's own weights stay where they are.

    Args:
        config: The recipe's.
        vocab_rows: Ids that the tokenizer has.
        with_reference: Whether a reference policy is kept.
        seed: Of new adapters.

    Raises:
        ConfigError, MissingDependencyError: see ``hf_model.load_module`` and ``LoraAdapters``.
    """

    def __init__(
        self, config: HFStudentConfig, vocab_rows: int, *, with_reference: bool, seed: int
    ) -> None:
        module = load_module(config)
        self.adapters: LoraAdapters | None = None
        if config.lora is not None:
            roles = (ACTOR, REFERENCE) if with_reference else (ACTOR,)
            self.adapters = LoraAdapters(module, config.lora, roles, seed)
        else:
            module.requires_grad_(requires_grad=True)
        self.model = HFModel(module, config, vocab_rows)
        self.has_reference = with_reference
        self._frozen: dict[str, Tensor] = {}
        """The reference without LoRA, on the CPU."""
        if with_reference:
            self.freeze_reference()

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """What an optimizer step moves, by name: weights, or the actor's adapter."""
        return self.model.weights if self.adapters is None else self.adapters.factors(ACTOR)

    @contextmanager
    def acting_as(self, role: str) -> Iterator[Named | None]:
        """Weights for ``HFModel.hidden`` and ``head`` under which a role acts within the block."""
        if self.adapters is not None:
            with self.adapters.acting_as(role):
                yield None
        elif role == REFERENCE:
            device = self.model.device
            yield {name: weight.to(device) for name, weight in self._frozen.items()}
        else:
            yield None

    @torch.no_grad()
    def freeze_reference(self) -> None:
        """Let the reference be what the actor is now."""
        if not self.has_reference:
            return
        if self.adapters is not None:
            self.adapters.copy(ACTOR, REFERENCE)
        else:
            self._frozen = {
                name: weight.detach().to("cpu", copy=True)
                for name, weight in self.model.weights.items()
            }

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight of the actor; see ``HFModel.merged``."""
        return self.model.merged(self.adapters, ACTOR)

    @property
    def reference(self) -> Mapping[str, Tensor]:
        """What a checkpoint holds of the reference; nothing without one."""
        if self.has_reference and self.adapters is not None:
            return self.adapters.factors(REFERENCE)
        return self._frozen

    def check(self, values: Mapping[str, Tensor]) -> None:
        """Raise unless these can be the actor's, or the reference's.

        Raises:
            CheckpointError: names, shapes or dtypes are of another model.
        """
        if self.adapters is not None:
            self.adapters.check(ACTOR, values)
            return
        if difference := first_difference(values, self.model.weights):
            raise CheckpointError(
                f"weight {difference}: the weights of another architecture or dtype"
            )

    @torch.no_grad()
    def take(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite the actor's weights or adapter, which ``check`` has passed."""
        for name, parameter in self.trained.items():
            parameter.copy_(values[name])

    @torch.no_grad()
    def take_reference(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite the reference's, which ``check`` has passed."""
        if self.adapters is not None:
            self.adapters.load(REFERENCE, values)
        else:
            self._frozen = dict(values)
