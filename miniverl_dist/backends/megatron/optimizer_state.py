"""Adam's moments and the float32 masters of a rank, parameter by parameter.

Three optimizers of megatron hide behind one view here: the distributed one, in which each
data-parallel rank owns a range of a parameter's elements; the one with float32 masters of bfloat16
weights; and the plain float32 one. Checkpoints store whole parameters under the model's own names,
so any of the three, under any layout, reads what another has written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

Kind = Literal["exp_avg", "exp_avg_sq", "master"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Slot:
    """What this rank's optimizer holds of one parameter."""

    optimizer: torch.optim.Optimizer
    master: Tensor
    """What the optimizer steps: the parameter, its float32 copy, or this rank's range of one."""
    elements: slice
    """Which elements of the flattened parameter those are."""

    def tensor(self, kind: Kind) -> Tensor:
        return self.master if kind == "master" else self.optimizer.state[self.master][kind]

    def materialise(self) -> None:
        """Make the state that torch creates in the first step only."""
        state = self.optimizer.state[self.master]
        for name in MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(self.master, memory_format=torch.preserve_format)

    def set_step(self, num_steps: int) -> None:
        # A tensor of its own for every parameter: torch counts up in place, and a shared one would
        # count once per parameter. Optimizers that count per group keep an int there instead.
        if isinstance(self.optimizer, torch.optim.Adam):
            self.optimizer.state[self.master]["step"] = torch.tensor(float(num_steps))


class OptimizerState:
    """The moments of a rank's optimizer.

    Args:
        module: The model on this rank.
        optimizer: megatron's optimizer of that model.
    """

    def __init__(self, module: torch.nn.Module, optimizer: MegatronOptimizer) -> None:
        self._parameters = dict(module.named_parameters())
        inner = [optimizer]
        if isinstance(optimizer, ChainedOptimizer):
            inner = list(optimizer.chained_optimizers)
        self._inner = [part for part in inner if not getattr(part, "is_stub_optimizer", False)]
        self._slots = dict(self._find_slots())

    def reset(self) -> None:
        """Forget all moments; the next step is the first."""
        for slot in self._slots.values():
            slot.materialise()
            for kind in MOMENTS:
                slot.tensor(kind).zero_()
        self.set_step(0)

    def set_step(self, num_steps: int) -> None:
        """Count ``num_steps`` steps as taken."""
        for slot in self._slots.values():
            slot.set_step(num_steps)
        for part in self._inner:
            for group in part.optimizer.param_groups:
                if "step" in group:
                    group["step"] = num_steps

    def whole(self, kind: Kind) -> dict[str, Tensor]:
        """Name -> whole parameter-shaped float32 CPU tensor, one of each per data-parallel group.

        All ranks call this together. Only the first rank of a parameter's data-parallel group gets
        the values, and only it writes them to a checkpoint; the others get a shape without memory.
        """
        return {name: self._gathered(name, kind) for name in self._parameters}

    def take(self, kind: Kind, values: Mapping[str, Tensor]) -> None:
        """Copy this rank's elements out of whole parameters, as ``whole`` named them."""
        for name, slot in self._slots.items():
            slot.materialise()
            mine = values[name].reshape(-1)[slot.elements]
            target = slot.tensor(kind)
            with torch.no_grad():
                target.copy_(mine.view(target.shape))

    def _gathered(self, name: str, kind: Kind) -> Tensor:
        parameter = self._parameters[name]
        group = data_parallel_group(parameter)
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        slot = self._slots.get(name)
        if slot is not None:
            slot.materialise()
            whole[slot.elements] = slot.tensor(kind).detach().reshape(-1).to(whole.dtype)
        if self._is_split:
            # Every element has one owner and zeros elsewhere: the sum is exact.
            dist.reduce(whole, dist.get_global_rank(group, 0), group=group)
        if group.rank() != 0:
            return torch.zeros(()).expand(parameter.shape)
        return whole.view(parameter.shape).cpu()

    @property
    def _is_split(self) -> bool:
        return any(isinstance(part, DistributedOptimizer) for part in self._inner)

    def _find_slots(self) -> Iterator[tuple[str, _Slot]]:
        owners: dict[Tensor, tuple[Any, Tensor, slice]] = {}
        for part in self._inner:
            if isinstance(part, DistributedOptimizer):
                for parameter, (group, order) in part.model_param_group_index_map.items():
                    master = part.optimizer.param_groups[group]["params"][order]
                    mine = part._get_model_param_range_map(parameter)["param"]
                    owners[parameter] = part.optimizer, master, slice(mine.start, mine.end)
            else:
                for parameter in self._stepped_by(part):
                    master = getattr(parameter, "main_param", parameter)
                    owners[parameter] = part.optimizer, master, slice(None)
        for name, parameter in self._parameters.items():
            if parameter in owners:
                yield name, _Slot(*owners[parameter])

    def _stepped_by(self, part: MegatronOptimizer) -> Iterator[Tensor]:
        stepped = {id(p) for group in part.optimizer.param_groups for p in group["params"]}
        for parameter in self._parameters.values():
            if id(getattr(parameter, "main_param", parameter)) in stepped:
                yield parameter


def data_parallel_group(parameter: Tensor) -> dist.ProcessGroup:
    """Ranks that hold the same parameter and see other data (CP counts: it splits the data)."""
    group: dist.ProcessGroup = (
        parallel_state.get_data_parallel_group(with_context_parallel=True)
        if getattr(parameter, "allreduce", True)
        else parallel_state.get_expert_data_parallel_group()
    )
    return group
