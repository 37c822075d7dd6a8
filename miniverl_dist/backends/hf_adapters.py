"""LoRA adapters of several roles over one frozen model.

The model itself is left as transformers made it: an adapter adds to the output of a linear layer
through a forward hook, so that its layers keep their names and classes (a quantised one too), and
which role acts is one reference that the hooks look at. Adapters are float32 whatever the model
is.

Not the ``peft`` package: it cannot be imported without ``accelerate``, renames every weight of the
model, and its switch of adapters also changes which of them are trained. What is stored here has
the names and the layout of its files.

Shapes: x [*, in], A [rank, in], B [out, rank].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader expects
from torch import Tensor, nn

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


class LoraAdapters:
    """Adapters by role; one of them, or none, takes part in the model's forward pass.

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
        self.layers = adapted_layers(model, config.target_modules)
        self.scale = config.alpha / config.rank
        model.requires_grad_(requires_grad=False)
        self._adapters = {role: self._new(seed) for role in roles}
        for role in roles[1:]:
            for factor in self._adapters[role].values():
                factor.requires_grad_(False)
        self._acting: str | None = roles[0]
        self._dropout = 0.0
        for name, layer in self.layers.items():
            layer.register_forward_hook(self._hook(name))

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles with an adapter, the trained one first."""
        return tuple(self._adapters)

    @property
    def acting(self) -> str | None:
        """Whose adapter takes part now; None: that of nobody, so the model as it was loaded."""
        return self._acting

    @contextmanager
    def acting_as(self, role: str | None) -> Iterator[None]:
        """Let a role's adapter take part within the block; None: no adapter.

        Raises:
            ConfigError: no such role.
        """
        if role is not None:
            self.factors(role)
        former, self._acting = self._acting, role
        try:
            yield
        finally:
            self._acting = former

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
        return self._adapters[role]

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
        wanted = {name: (f.dtype, tuple(f.shape)) for name, f in self.factors(role).items()}
        found = {name: (value.dtype, tuple(value.shape)) for name, value in values.items()}
        if found != wanted:
            name = min(n for n in wanted | found if wanted.get(n) != found.get(n))
            raise CheckpointError(
                f"the adapter's {name!r} is {found.get(name)}, expected {wanted.get(name)}: other "
                "layers, another rank or another model"
            )

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
        first, second = self._pair(role, layer)
        delta = (second @ first).mul_(self.scale)
        if is_transposed(self.layers[layer]):
            delta = delta.T
        return (weight.float() + delta).to(weight.dtype)

    def _new(self, seed: int) -> Factors:
        factors: Factors = {}
        for name, layer in self.layers.items():
            sizes = layer_sizes(layer) or (0, 0)  # never: adapted_layers has chosen by it
            device = next(layer.parameters()).device
            generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
            bound = 1 / math.sqrt(sizes[0])
            first = torch.empty(self.config.rank, sizes[0]).uniform_(
                -bound, bound, generator=generator
            )
            second = torch.zeros(sizes[1], self.config.rank)
            factors[f"{name}.lora_A"] = nn.Parameter(first.to(device))
            factors[f"{name}.lora_B"] = nn.Parameter(second.to(device))
        return factors

    def _pair(self, role: str, layer: str) -> tuple[Tensor, Tensor]:
        factors = self._adapters[role]
        return factors[f"{layer}.lora_A"], factors[f"{layer}.lora_B"]

    def _hook(self, layer: str) -> Any:  # noqa: ANN401 - torch's own type of a hook is as loose
        def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if self._acting is None:
                return output
            first, second = self._pair(self._acting, layer)
            x = inputs[0].to(first.dtype)
            if self._dropout:
                x = F.dropout(x, self._dropout)
            added = F.linear(F.linear(x, first), second).mul(self.scale)
            return output + added.to(output.dtype)

        return add


def peft_name(factor: str) -> str:
    """What a factor is called in the files of ``peft``."""
    return f"base_model.model.{factor}.weight"


def peft_config(adapters: LoraAdapters) -> dict[str, Any]:
    """``adapter_config.json``; the base model is left out, which would be a path."""
    layers = adapters.layers.values()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapters.config.rank,
        "lora_alpha": adapters.config.alpha,
        "lora_dropout": adapters.config.dropout,
        "target_modules": sorted(adapters.config.target_modules),
        "bias": "none",
        "fan_in_fan_out": any(is_transposed(layer) for layer in layers),
        "inference_mode": True,
    }
