"""LoRA adapters of several roles over one frozen model.

The model itself is left as transformers made it: an adapter adds to the output of a linear layer
through a forward hook, so that its layers keep their names and classes (a quantised one too), and
which role acts is what the hooks ask for. Adapters are float32 whatever the model is.

Not the ``peft`` package: it cannot be imported without ``accelerate``, renames every weight of the
model, and its switch of adapters also changes which of them are trained. What is stored here has
the names and the layout of its files.

Shapes: x [*, in], A [rank, in], B [out, rank].
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader expects
from torch import Tensor, nn

from miniverl_dist.backends.tensors import first_difference
from miniverl_dist.config.roles import LoraConfig
from miniverl_dist.errors import CheckpointError, ConfigError
from miniverl_dist.schemas.seeds import derive_seed

FACTORS = ("lora_A", "lora_B")
ACTOR, REFERENCE, TEACHER = "actor", "reference", "teacher"
Factors = dict[str, nn.Parameter]
"""``<layer>.lora_A`` [rank, in] and ``<layer>.lora_B`` [out, rank] of every adapted layer."""


def layer_sizes(layer: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear layer, be it quantised or transposed; None of any other."""
    if hasattr(layer, "in_features") and hasattr(layer, "out_features"):
        return int(layer.in_features), int(layer.out_features)  # type: ignore[arg-type]
    if is_transposed(layer):
        return int(layer.nx), int(layer.nf)  # type: ignore[arg-type]
    return None


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer's weight is [in, out] (transformers' ``Conv1D``)."""
    return hasattr(layer, "nx") and hasattr(layer, "nf")


def adapted_layers(model: Any, names: Sequence[str]) -> dict[str, nn.Module]:  # noqa: ANN401 - untyped library
    """Linear layers whose last name is one of ``names``, by their whole names.

    Raises:
        ConfigError: a name that no linear layer has, or that of the output projection.
    """
    linear = {name: m for name, m in model.named_modules() if layer_sizes(m) is not None}
    head = model.get_output_embeddings()
    found = {name: m for name, m in linear.items() if name.rpartition(".")[2] in names}
    if any(module is head for module in found.values()):
        raise ConfigError(
            "lora.target_modules names the output projection, which is multiplied in chunks and "
            "cannot have an adapter: leave it out"
        )
    lasts = {name.rpartition(".")[2] for name, m in linear.items() if m is not head}
    if missing := sorted(set(names) - lasts):
        raise ConfigError(
            f"lora.target_modules: a {model.config.model_type} model has no linear layer "
            f"{missing[0]!r}; it has {', '.join(sorted(lasts))}"
        )
    return found


@dataclass(frozen=True)
class _Adapter:
    factors: Factors
    scale: float


class LoraAdapters:
    """Adapters by role; one of them, or none, takes part in the model's forward pass.

    Which one is known to each thread for itself: a teacher may score in one while the actor is
    trained in another. A thread that has chosen none has the trained role's, as have those in which
    torch computes layers again during a backward pass.

    Args:
        model: A transformers model; all of its weights are frozen here.
        config: Sizes and layers.
        roles: Which adapters there are. The first is trained and acts unless told otherwise.
        seed: Of A; B is 0, so that a new adapter changes nothing.

    Raises:
        ConfigError: see ``adapted_layers``; or a role given twice.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - untyped library
        config: LoraConfig,
        roles: Sequence[str],
        seed: int,
    ) -> None:
        if len(set(roles)) != len(roles):
            raise ConfigError(f"roles {', '.join(roles)}: each needs an adapter of its own")
        self.config = config
        self.scale = config.alpha / config.rank
        self.layers = adapted_layers(model, config.target_modules)
        """Of the roles that the recipe's sizes are for."""
        model.requires_grad_(requires_grad=False)
        self._model = model
        self._adapters: dict[str, _Adapter] = {}
        self._hooked: set[str] = set()
        self._trained = roles[0]
        self._chosen = threading.local()
        self._dropout = 0.0
        for role in roles:
            self._put(role, config, self._new(self.layers, config, seed), self.layers)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles with an adapter, the trained one first."""
        return tuple(self._adapters)

    @property
    def acting(self) -> str | None:
        """Whose adapter takes part in this thread; None: nobody's, so the model as loaded."""
        role: str | None = getattr(self._chosen, "role", self._trained)
        return role

    def add(self, role: str, config: LoraConfig, values: Mapping[str, Tensor]) -> None:
        """Give a role an adapter of sizes and layers of its own; it is never trained.

        Raises:
            ConfigError: the role has one already; layers that the model does not have.
            CheckpointError: values of another form; see ``check``.
        """
        if role in self._adapters:
            raise ConfigError(f"roles: there is an adapter for {role!r} already")
        layers = adapted_layers(self._model, config.target_modules)
        new = self._new(layers, config, seed=0)
        _require_form(new, values)
        with torch.no_grad():
            for name, factor in new.items():
                factor.copy_(values[name])
        self._put(role, config, new, layers)

    @contextmanager
    def acting_as(self, role: str | None) -> Iterator[None]:
        """Let a role's adapter take part within the block; None: no adapter.

        Raises:
            ConfigError: no such role.
        """
        if role is not None:
            self.factors(role)
        former, self._chosen.role = self.acting, role
        try:
            yield
        finally:
            self._chosen.role = former

    @contextmanager
    def dropout(self, seed: int) -> Iterator[None]:
        """Within the block, drop parts of the adapters' inputs, drawn from ``seed``.

        The backward pass belongs into the block: recomputed layers must drop the same.
        """
        if self.config.dropout == 0:
            yield
            return
        devices = [p.device for p in self.factors(self.roles[0]).values() if p.is_cuda][:1]
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            self._dropout = self.config.dropout
            try:
                yield
            finally:
                self._dropout = 0.0

    def factors(self, role: str) -> Factors:
        """A role's own parameters.

        Raises:
            ConfigError: no such role.
        """
        if role not in self._adapters:
            raise ConfigError(f"no adapter for role {role!r}; there are {', '.join(self.roles)}")
        return self._adapters[role].factors

    @torch.no_grad()
    def copy(self, source: str, target: str) -> None:
        """Give a role the values of another's adapter; the two stay apart."""
        given = self.factors(source)
        for name, factor in self.factors(target).items():
            factor.copy_(given[name])

    def check(self, role: str, values: Mapping[str, Tensor]) -> None:
        """Raise unless ``values`` are an adapter of this very form.

        Raises:
            CheckpointError: names, shapes or dtypes differ.
        """
        _require_form(self.factors(role), values)

    @torch.no_grad()
    def load(self, role: str, values: Mapping[str, Tensor]) -> None:
        """Overwrite a role's adapter; all of it, or nothing.

        Raises:
            CheckpointError: see ``check``.
        """
        self.check(role, values)
        for name, factor in self.factors(role).items():
            factor.copy_(values[name])

    @torch.no_grad()
    def merged(self, layer: str, weight: Tensor, role: str) -> Tensor:
        """A layer's weight with a role's adapter in it: a new tensor of the same dtype.

        Args:
            layer: Name of the layer.
            weight: Not quantised.
            role: Whose adapter.
        """
        factors = self.factors(role)
        first, second = factors[f"{layer}.lora_A"], factors[f"{layer}.lora_B"]
        delta = (second @ first).mul_(self._adapters[role].scale)
        if is_transposed(self.layers[layer]):
            delta = delta.T
        return (weight.float() + delta).to(weight.dtype)

    def _new(self, layers: Mapping[str, nn.Module], config: LoraConfig, seed: int) -> Factors:
        factors: Factors = {}
        for name, layer in layers.items():
            sizes = layer_sizes(layer) or (0, 0)  # never: adapted_layers has chosen by it
            device = next(layer.parameters()).device
            generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
            bound = 1 / math.sqrt(sizes[0])
            first = torch.empty(config.rank, sizes[0]).uniform_(-bound, bound, generator=generator)
            second = torch.zeros(sizes[1], config.rank)
            factors[f"{name}.lora_A"] = nn.Parameter(first.to(device))
            factors[f"{name}.lora_B"] = nn.Parameter(second.to(device))
        return factors

    def _put(
        self, role: str, config: LoraConfig, factors: Factors, layers: Mapping[str, nn.Module]
    ) -> None:
        if role != self._trained:
            for factor in factors.values():
                factor.requires_grad_(False)
        self._adapters[role] = _Adapter(factors, config.alpha / config.rank)
        for name in layers.keys() - self._hooked:
            layers[name].register_forward_hook(self._hook(name))
            self._hooked.add(name)

    def _hook(self, layer: str) -> Any:  # noqa: ANN401 - torch's own type of a hook is as loose
        def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            role = self.acting
            if role is None:
                return output
            adapter = self._adapters[role]
            first = adapter.factors.get(f"{layer}.lora_A")
            if first is None:
                return output
            x = inputs[0].to(first.dtype)
            if self._dropout and role == self._trained:
                x = F.dropout(x, self._dropout)
            second = adapter.factors[f"{layer}.lora_B"]
            added = F.linear(F.linear(x, first), second).mul(adapter.scale)
            return output + added.to(output.dtype)

        return add


def _require_form(factors: Factors, values: Mapping[str, Tensor]) -> None:
    """See ``LoraAdapters.check``."""
    if difference := first_difference(values, factors):
        raise CheckpointError(
            f"the adapter's {difference}: other layers, another rank or another model"
        )
