"""Makes SGLang's wheel importable on a CPU without triton, AMX and its compiled kernels.

Only for tests: the folder is put on the PYTHONPATH of the server's process, and Python imports this
file at its start. Nothing of SGLang is replaced. What is missing is given a name, so that modules
which mention it can be imported; whatever is then called all the same raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ROUND_UP = {
    "cdiv": lambda value, unit: -(value // -unit),
    "next_power_of_2": lambda value: 1 << max(value - 1, 0).bit_length(),
}
"""The only functions of triton that are called outside of kernels."""


class Kernel:
    """A function that triton would have compiled."""

    def __init__(self, function: Any) -> None:
        self.fn, self.arg_names = function, []
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__module__ = getattr(function, "__module__", __name__)
        self.__doc__ = getattr(function, "__doc__", None)

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(f"kernel {self.__name__} was launched, but there is no triton here")

    def __call__(self, *values: Any, **named: Any) -> Any:
        raise RuntimeError(f"kernel {self.__name__} was called, but there is no triton here")


def _compiled(function: Any) -> Kernel:
    return function if isinstance(function, Kernel) else Kernel(function)


class Name:
    """Anything lower-case in triton: decorator, dtype, namespace."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, *values: Any, **named: Any) -> Any:
        if len(values) == 1 and callable(values[0]) and not named:
            return _compiled(values[0])
        # A decorator with options; whoever asks for the driver's target finds no name in it.
        return _compiled

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(f"{self.path}.{name}")

    def __getitem__(self, index: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()


class TritonModule(ModuleType):
    """``triton`` or one of its modules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        made = type(name, (), {"__init__": _take_anything}) if name[0].isupper() else Name(path)
        setattr(self, name, made)
        return made


def _take_anything(self: object, *values: Any, **named: Any) -> None:
    del self, values, named


class TritonFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what no other finder has found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = TritonModule(spec.name)
        module.__path__ = []
        if spec.name == "triton":
            vars(module).update(ROUND_UP, __version__="3.0.0")
        return module

    def exec_module(self, module: ModuleType) -> None:
        del module


class BeforeImport(importlib.abc.MetaPathFinder):
    """Acts when a module is about to be imported for the first time."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._library: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in self._seen:
            return None
        self._seen.add(name)
        if name == "torchvision":
            self._declare_operators()
        elif name == "sglang.srt.mem_cache.pool_host.common":
            return self._without_pinning(name)
        return None

    def _declare_operators(self) -> None:
        """torchvision's compiled part is for CUDA; its Python describes two operators of it."""
        import torch

        self._library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            signature = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            self._library.define(signature)

    def _without_pinning(self, name: str) -> importlib.machinery.ModuleSpec | None:
        """Buffers for routed experts would be registered with CUDA."""
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def run(module: ModuleType) -> None:
            execute(module)
            module._cuda_host_register = lambda *values: None  # type: ignore[attr-defined]

        spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, BeforeImport())
sys.meta_path.append(TritonFinder())
