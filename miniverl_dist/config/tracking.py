"""Trackers that follow a run.

None of these holds a secret: keys come from the tracker's own files and variables.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from miniverl_dist.config.base import ConfigModel, PositiveFloat
from miniverl_dist.config.urls import server_url

_SQLITE = re.compile(r"sqlite:///[^?#]+")


def _server(uri: str) -> str:
    if "@" in uri:
        raise ValueError(
            "the URL holds credentials: a tracker takes them from its own variables or files "
            "(docs/tracking.md)"
        )
    return server_url(uri)


def _store(uri: str) -> str:
    """A server's URL in its one form, or a database file."""
    return uri if _SQLITE.fullmatch(uri) else _server(uri)


Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
ServerUrl = Annotated[str, AfterValidator(_server)]
StoreUri = Annotated[str, AfterValidator(_store)]


class TrackerConfig(ConfigModel):
    """What all trackers share."""

    deadline_s: PositiveFloat = 60.0
    """At the end of a run, for what the tracker has not taken yet. Nothing waits for it before."""


class TensorBoardConfig(TrackerConfig):
    """Event files for TensorBoard."""

    kind: Literal["tensorboard"]
    folder: Path | None = None
    """In which the run gets a folder of its name; None: ``tensorboard/`` in the run directory."""


class WandbConfig(TrackerConfig):
    """Weights & Biases."""

    kind: Literal["wandb"]
    project: Label = "miniverl-dist"
    entity: Label | None = None
    """Team or user; None takes the one that wandb is logged in with."""
    name: Label | None = None
    """None: the name of the run directory."""
    mode: Literal["offline", "online"] = "offline"
    """``offline`` writes files for `wandb sync`; ``online`` needs `wandb login` beforehand."""
    folder: Path | None = None
    """In which ``wandb/`` is made; None: the run directory."""


class MlflowConfig(TrackerConfig):
    """MLflow."""

    kind: Literal["mlflow"]
    uri: StoreUri
    """``sqlite:///FILE`` (offline) or ``http(s)://host[:port][/prefix]``."""
    project: Label = "miniverl-dist"
    """MLflow's experiment."""
    name: Label | None = None
    """None: the name of the run directory."""


class TrackioConfig(TrackerConfig):
    """Trackio."""

    kind: Literal["trackio"]
    project: Label = "miniverl-dist"
    name: Label | None = None
    """None: the name of the run directory. A few signs of the run's id are added."""
    uri: ServerUrl | None = None
    """A Trackio server; None: files on this machine, where TRACKIO_DIR says."""


TrackingConfig = Annotated[
    TensorBoardConfig | WandbConfig | MlflowConfig | TrackioConfig, Field(discriminator="kind")
]
