"""Environments by name: an explicit table that ``actors`` fills, and no other way in.

A recipe can name only what was registered here; a dotted path in a recipe would be a way to run
any code on the cluster.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from miniverl_dist.environments.base import Environment
from miniverl_dist.errors import ConfigError

EnvironmentFactory = Callable[[Mapping[str, Any]], Environment]
"""Builds an environment from its options, the fields of its config section without ``kind``."""


class EnvironmentRegistry:
    """Names and factories; a name is given once."""

    def __init__(self) -> None:
        self._factories: dict[str, EnvironmentFactory] = {}

    def names(self) -> tuple[str, ...]:
        """Registered names, sorted."""
        return tuple(sorted(self._factories))

    def register(self, name: str, factory: EnvironmentFactory) -> None:
        """Add an environment.

        Raises:
            ConfigError: the name is taken, or is not a plain identifier.
        """
        if not name.isidentifier():
            raise ConfigError(
                f"environment name {name!r} is not a plain identifier: names are chosen in code, "
                "dotted paths are not loaded"
            )
        if name in self._factories:
            raise ConfigError(f"environment {name!r} is registered twice; choose another name")
        self._factories[name] = factory

    def create(self, name: str, options: Mapping[str, Any] | None = None) -> Environment:
        """Build the environment called ``name``.

        Raises:
            ConfigError: no such environment; the message lists the known ones.
        """
        factory = self._factories.get(name)
        if factory is None:
            known = ", ".join(self.names()) or "none"
            close = difflib.get_close_matches(name, self.names(), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"environment.kind: unknown environment {name!r}, known: {known}{hint}"
            )
        return factory(options or {})
