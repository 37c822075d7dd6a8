"""Stands in for SGLang's compiled kernels; without AMX its CPU engine has plain torch for them."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__") or not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*values: Any, **named: Any) -> Any:
        raise RuntimeError(f"sgl_kernel.{name} was called, but it is not installed here")

    return missing
