"""Lets megatron-core run where torch has no CUDA; does nothing where it has.

Megatron's modules say ``device="cuda"`` and ask ``torch.cuda`` for devices, streams and random
states. Here those modules, and no others, see a stand-in under the name ``torch``: its factories
put on the CPU what was meant for CUDA, its ``cuda`` answers for the CPU, its ``distributed`` does
what gloo lacks. torch itself keeps its
functions, so a model that transformers loads in the same process is not touched. Two methods of
``torch.Tensor`` have to change: ``cuda()``, which raises without CUDA anyway, and ``type()``, whose
answer only differs for megatron's modules.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

PACKAGE = "megatron.core"

LATE_IMPORTS = (
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.state_dict_saver",
    "distributed",
    "models.gpt",
    "optimizer",
    "pipeline_parallel.schedules",
    "ssm.gated_delta_net",
    "transformer.moe.moe_layer",
    "transformer.moe.token_dispatcher",
)
"""Modules that megatron itself imports only when they are used; they need the stand-in too."""

FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "ones",
    "ones_like",
    "tensor",
    "zeros",
    "zeros_like",
)


class _Event:
    """A CUDA event on a device where everything has already happened."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take and ignore CUDA's flags."""

    def record(self, *_: object) -> None:
        """Do nothing."""

    def wait(self, *_: object) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Whether the work before the event is done."""
        return True


class _Stream(_Event):
    """The one stream of a CPU."""

    def wait_stream(self, *_: object) -> None:
        """Do nothing."""

    def wait_event(self, *_: object) -> None:
        """Do nothing."""

    def record_event(self, *_: object) -> _Event:
        """An event that has happened."""
        return _Event()


def _nothing(*_: object, **__: object) -> None:
    pass


def _stream(*_: object, **__: object) -> _Stream:
    return _Stream()


def _no_context(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _get_rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)


def _cpu(*_: object, **__: object) -> torch.device:
    return torch.device("cpu")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - torch's own arguments
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _all_gather(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """``all_gather`` of parts that may differ in their first dimension, which gloo refuses."""
    longest = max(len(output) for output in outputs)
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    received = [torch.empty_like(padded) for _ in outputs]
    dist.all_gather(received, padded, group=group)
    for output, part in zip(outputs, received, strict=True):
        output.copy_(part[: len(output)])


def _reduce_scatter(
    output: torch.Tensor, inputs: list[torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Sum of parts that may differ in their first dimension, which gloo refuses."""
    total = torch.cat(inputs)
    dist.all_reduce(total, group=group)
    output.copy_(torch.split(total, [len(part) for part in inputs])[dist.get_rank(group)])


class _Module(types.ModuleType):
    """A module with some names replaced; the others are those of ``original``, looked up late."""

    def __init__(self, original: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(replaced)
        self._original = original

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module holds
        return getattr(self._original, name)


@cache
def _torch_without_cuda() -> _Module:
    cuda = _Module(
        torch.cuda,
        {
            "Event": _Event,
            "Stream": _Stream,
            "current_device": _cpu,
            "current_stream": _stream,
            "default_stream": _stream,
            "empty_cache": _nothing,
            "get_rng_state": _get_rng_state,
            "manual_seed": _seed,
            "set_device": _nothing,
            "set_rng_state": _set_rng_state,
            "set_stream": _nothing,
            "stream": _no_context,
            "synchronize": _nothing,
        },
    )
    collectives = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}
    factories = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    distributed = _Module(torch.distributed, collectives)
    return _Module(torch, {"cuda": cuda, "distributed": distributed, **factories})


_TORCH_TYPE = torch.Tensor.type


def _type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """``Tensor.type``; megatron's optimizers compare the name with ``torch.cuda.FloatTensor``."""
    if dtype is not None:
        return _TORCH_TYPE(self, dtype, *args, **kwargs)
    name = _TORCH_TYPE(self)
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return name.replace("torch.", "torch.cuda.", 1) if caller.startswith(PACKAGE) else name


def _cuda(self: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return self


def _stay_on_cpu(
    tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False
) -> object:
    """Megatron's copy to host memory, for tensors that are there."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _replace_functions() -> None:
    """Functions whose own code cannot work without CUDA."""
    random: Any = importlib.import_module(f"{PACKAGE}.tensor_parallel.random")
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    # It warns of what is meant here: both random states are the CPU's.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    for name in ("moe_utils", "token_dispatcher"):
        module: Any = importlib.import_module(f"{PACKAGE}.transformer.moe.{name}")
        module.maybe_move_tensor_to_cpu = _stay_on_cpu


def install() -> None:
    """Make megatron-core usable on the CPU; returns at once where CUDA exists. Idempotent."""
    if torch.cuda.is_available():
        return
    for name in LATE_IMPORTS:
        importlib.import_module(f"{PACKAGE}.{name}")
    stand_in = _torch_without_cuda()
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGE) and getattr(module, "torch", None) is torch:
            module.torch = stand_in  # type: ignore[attr-defined]
    _replace_functions()
    torch.Tensor.type = _type  # type: ignore[assignment, method-assign]
    torch.Tensor.cuda = _cuda  # type: ignore[assignment, method-assign]
    # megatron compiles small functions with inductor as they are first called: minutes on a CPU,
    # and wrong through the stand-in. The stance holds for functions that are already decorated.
    torch.compiler.set_stance("force_eager")
