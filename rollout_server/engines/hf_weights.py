"""Weights of a transformers model under the names its files on disk have.

In memory transformers keeps all experts of a layer in two tensors; on disk most checkpoints hold
three matrices per expert. A published tensor is therefore matched with the *view* of a parameter
that it fills, and what the model holds is read back through the same views.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import torch

from miniverl_dist.backends.tensors import as_numpy, as_tensor
from miniverl_dist.errors import CheckpointError
from miniverl_dist.schemas.weights import NamedArrays, combined_digest, tensor_digest

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_TEXT_PREFIX = "model.language_model."
"""Files of a model with a vision part name its text part so."""


def matched_views(model: torch.nn.Module, tensors: NamedArrays) -> dict[str, torch.Tensor]:
    """The view of a parameter that each named array fills; nothing is written.

    Raises:
        CheckpointError: names, shapes or dtypes are not those of the model, or a parameter is not
            filled exactly once; the message names the first.
    """
    parameters = dict(model.named_parameters())
    views: dict[str, torch.Tensor] = {}
    filled: Counter[str] = Counter()
    for name, array in tensors.items():
        found = _view(parameters, name)
        if found is None:
            raise CheckpointError(
                f"weights hold {name!r}, which the model does not have: another architecture, "
                "another number of layers or experts, or an output layer that is tied here"
            )
        owner, view = found
        expected = str(view.dtype).removeprefix("torch.")
        if array.shape != tuple(view.shape) or array.dtype.name != expected:
            raise CheckpointError(
                f"weight {name!r} is {array.dtype.name} {array.shape}, the model has "
                f"{expected} {tuple(view.shape)} there"
            )
        views[name] = view
        filled[owner] += view.numel()
    for owner, parameter in parameters.items():
        if filled[owner] != parameter.numel():
            raise CheckpointError(
                f"weights fill {filled[owner]} of the {parameter.numel()} values of {owner!r}, "
                "expected each of them once"
            )
    return views


@torch.no_grad()
def fill(views: Mapping[str, torch.Tensor], tensors: NamedArrays) -> None:
    """Copy arrays into the views that ``matched_views`` has found for them, one at a time."""
    for name, view in views.items():
        view.copy_(as_tensor(tensors[name]))


def held_checksum(views: Mapping[str, torch.Tensor]) -> str:
    """``schemas.weights.weights_checksum`` of what the views hold, one tensor at a time."""
    return combined_digest({name: tensor_digest(name, as_numpy(v)) for name, v in views.items()})


def _view(parameters: Mapping[str, torch.Tensor], name: str) -> tuple[str, torch.Tensor] | None:
    """A parameter's name and the part of it that is called ``name`` on disk."""
    if name.startswith(_TEXT_PREFIX):
        name = "model." + name.removeprefix(_TEXT_PREFIX)
    if name in parameters:
        return name, parameters[name]
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return None
    prefix, index, part = expert[1], int(expert[2]), expert[3]
    owner = f"{prefix}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
    if owner not in parameters or index >= len(parameters[owner]):
        return None
    fused = parameters[owner].detach()[index]
    if part == "down":
        return owner, fused
    return owner, fused.chunk(2)[0 if part == "gate" else 1]
