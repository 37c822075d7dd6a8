from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from miniverl_dist.environments.base import Session, TaskInfo
from miniverl_dist.environments.registry import EnvironmentRegistry
from miniverl_dist.errors import ConfigError


class Shelf:
    """The smallest environment: tasks named by its options."""

    name = "shelf"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)

    def tasks(self) -> Mapping[str, TaskInfo]:
        return {}

    def start(self, task_id: str, *, prefix_calls: int) -> Session:
        raise NotImplementedError

    def provenance(self) -> dict[str, str]:
        return {}


@pytest.fixture
def registry() -> EnvironmentRegistry:
    registry = EnvironmentRegistry()
    registry.register("shelf", Shelf)
    registry.register("attic", Shelf)
    return registry


def test_create_hands_the_options_to_the_factory(registry: EnvironmentRegistry) -> None:
    environment = registry.create("shelf", {"prompt": "full"})
    assert isinstance(environment, Shelf)
    assert environment.options == {"prompt": "full"}
    assert registry.names() == ("attic", "shelf")


def test_create_makes_a_new_environment_each_time(registry: EnvironmentRegistry) -> None:
    assert registry.create("shelf") is not registry.create("shelf")


def test_unknown_name_lists_the_known(registry: EnvironmentRegistry) -> None:
    with pytest.raises(ConfigError, match=r"'shelv', known: attic, shelf; did you mean 'shelf'\?"):
        registry.create("shelv")


def test_empty_registry_says_so() -> None:
    with pytest.raises(ConfigError, match="known: none"):
        EnvironmentRegistry().create("shelf")


def test_a_name_is_given_once(registry: EnvironmentRegistry) -> None:
    with pytest.raises(ConfigError, match="'shelf' is registered twice"):
        registry.register("shelf", Shelf)


@pytest.mark.parametrize("name", ["my.module:Env", "my.module.Env", "", "a b"])
def test_dotted_paths_are_refused(registry: EnvironmentRegistry, name: str) -> None:
    with pytest.raises(ConfigError):
        registry.register(name, Shelf)
    with pytest.raises(ConfigError, match="unknown environment"):
        registry.create(name)


def test_registries_do_not_share_names(registry: EnvironmentRegistry) -> None:
    assert EnvironmentRegistry().names() == ()
