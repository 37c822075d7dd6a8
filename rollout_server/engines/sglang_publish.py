"""One publish into one paused server: load, check what it holds, name it; torch-free."""

from __future__ import annotations

import asyncio
from pathlib import Path

from miniverl_dist.backends.megatron.architecture import Architecture
from miniverl_dist.config.recipe import SGLangEngineConfig
from miniverl_dist.errors import PublishError
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import NamedArrays, combined_digest, tensor_digest
from rollout_server.engines.sglang_control import SGLangControl
from rollout_server.engines.sglang_layout import (
    HeldWeights,
    check_changes,
    check_exactly,
    exact_digests,
    is_known_exactly,
)
from rollout_server.engines.sglang_loading import DiskLoader, WeightLoader


class SGLangPublisher:
    """Knows what the server held last, and finds out what it holds now.

    Args:
        arch: Of the model.
        loader: Brings the weights.
        engine: Its name, for messages.
        is_exact: The server's digests can be computed here: no shards, no GPU, a known model.
    """

    def __init__(
        self, arch: Architecture, loader: WeightLoader, engine: str, *, is_exact: bool
    ) -> None:
        self._arch, self._loader, self._engine, self._is_exact = arch, loader, engine, is_exact
        self._sent: dict[str, str] | None = None
        """Digests of the tensors of the last load; None for a server that had none."""

    def forget_server(self) -> None:
        """The server is gone."""
        self._sent = None
        self._loader.forget_server()

    async def put(self, control: SGLangControl, snapshot: WeightSnapshot) -> str:
        """Bring weights into a paused server, and name them once they have been checked.

        Returns:
            The checksum of the tensors that were sent; the server holds exactly these, or, where
            only changes can be seen, has changed exactly as they have.

        Raises:
            EngineError: it did not take them. It may hold anything.
            PublishError: it holds something else. So it may.
        """
        sent = await asyncio.to_thread(_digests, snapshot.tensors)
        if self._is_exact:
            expected = await asyncio.to_thread(exact_digests, self._arch, snapshot.tensors)
            await self._loader.load(control, snapshot)
            check_exactly(await control.held_weights(), expected, self._engine)
        else:
            former = await control.held_weights()
            await self._loader.load(control, snapshot)
            self._check_changes(await control.held_weights(), former, sent)
        await control.flush()
        await self._name(control, str(snapshot.policy_version))
        self._sent = sent
        return combined_digest(sent)

    def _check_changes(self, held: HeldWeights, former: HeldWeights, sent: dict[str, str]) -> None:
        # Dummy weights are like no real ones.
        then = self._sent or {}
        changed = {name: then.get(name) != digest for name, digest in sent.items()}
        check_changes(held, former, changed, self._engine)

    async def _name(self, control: SGLangControl, version: str) -> None:
        await control.set_version(version)
        found = (await control.model_info()).weight_version
        if found != version:
            raise PublishError(
                f"engine {self._engine} says that it holds version {found}, expected {version}"
            )


def publisher_of(
    config: SGLangEngineConfig, arch: Architecture, engine: str, work_dir: Path
) -> SGLangPublisher:
    """The publisher that a config asks for."""
    is_exact = config.device == "cpu" and config.tensor == 1 and is_known_exactly(arch)
    return SGLangPublisher(arch, _loader_of(config, engine, work_dir), engine, is_exact=is_exact)


def _loader_of(config: SGLangEngineConfig, engine: str, work_dir: Path) -> WeightLoader:
    if config.load_weights_by == "disk":
        return DiskLoader(work_dir / "weights")
    from rollout_server.engines.sglang_broadcast import BroadcastLoader

    return BroadcastLoader(
        engine,
        num_ranks=config.tensor,
        bucket_bytes=config.bucket_bytes,
        timeout_s=config.load_deadline_s,
    )


def _digests(tensors: NamedArrays) -> dict[str, str]:
    return {name: tensor_digest(name, array) for name, array in tensors.items()}
