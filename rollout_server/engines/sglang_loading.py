"""How a snapshot gets into a server: the port, and the way through a folder; torch-free.

The other way, a broadcast, is ``sglang_broadcast``. Neither says what the server then holds: the
engine asks it.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Protocol

from safetensors.numpy import save_file

from miniverl_dist.errors import PublishError
from miniverl_dist.ports import WeightSnapshot
from rollout_server.engines.sglang_control import SGLangControl

WEIGHTS_FILE = "model.safetensors"


class WeightLoader(Protocol):
    """Brings weights into a paused server."""

    async def load(self, control: SGLangControl, snapshot: WeightSnapshot) -> None:
        """Bring them; afterwards the server may hold anything until it has been checked.

        Raises:
            EngineError: the server did not take them, or not all of them.
        """

    def forget_server(self) -> None:
        """The server is gone; what was set up with it is, too."""


class DiskLoader:
    """Through a folder of safetensors that the server reads.

    Args:
        folder: Local to the machine; holds one version at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def load(self, control: SGLangControl, snapshot: WeightSnapshot) -> None:
        """See ``WeightLoader``."""
        target = self._folder / str(snapshot.policy_version)
        try:
            # Waits for the disk.
            await asyncio.to_thread(self._write, target, snapshot)
            await control.load_folder(target)
        finally:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def forget_server(self) -> None:
        """See ``WeightLoader``."""

    def _write(self, target: Path, snapshot: WeightSnapshot) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            target.mkdir(parents=True)
            save_file(dict(snapshot.tensors), target / WEIGHTS_FILE, metadata={"format": "pt"})
        except OSError as error:
            raise PublishError(
                f"the weights of policy version {snapshot.policy_version} cannot be written to "
                f"{target}: {error.strerror or error}"
            ) from error
