"""An SGLang server beside ``/generate``: pause, weights, cache, memory; torch-free.

Whatever is not answered with 200 is an ``EngineError`` here. What it means for the weights the
caller decides: some updates answer 400 although they took place.

Source: SGLang 0.5.23; replies recorded in tests/fixtures/sglang_replies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from miniverl_dist.errors import EngineError, GenerateApiError
from miniverl_dist.generate_api.transport import Answer, RetryableError, Transport
from miniverl_dist.generate_api.wire import ModelInfo
from rollout_server.engines.sglang_layout import HeldWeights

T = TypeVar("T")

FLUSH_GRACE_S, FLUSH_PAUSE_S = 3.0, 0.05
_BUSY = 400
"""What a server answers that cannot flush its cache now."""
MEMORY_TAGS = ("kv_cache", "weights")
"""What a server can give back while it is idle."""


class _Ended(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""


class _RankChecksums(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


class _Checksums(msgspec.Struct, frozen=True):
    success: bool
    ranks: tuple[_RankChecksums, ...] = ()


class SGLangControl:
    """Talks to one server.

    Args:
        url: Of the server.
        deadline_s: For a call that loads nothing.
        load_deadline_s: For a call that moves, checks or gives back weights.
    """

    def __init__(self, url: str, *, deadline_s: float, load_deadline_s: float) -> None:
        self.url = url
        self._deadline_s, self._load_deadline_s = deadline_s, load_deadline_s
        self._transport = Transport({})

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def is_healthy(self) -> bool:
        """Whether the server says that it is ready; False too where it cannot be reached."""
        try:
            await self._call("GET", "/health", None, self._deadline_s)
        except EngineError:
            return False
        return True

    async def model_info(self) -> ModelInfo:
        """Folder and weight version; answers while the server is paused, too."""
        return self._read(await self._call("GET", "/model_info", None, self._deadline_s), ModelInfo)

    async def pause(self) -> None:
        """Stop decoding; running requests go back to the queue and lose their cache."""
        await self._post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """Go on decoding."""
        await self._post("/continue_generation", {})

    async def flush(self) -> None:
        """Forget all cached prefixes; refused while requests run.

        A server gives a reply a moment before it counts the request as ended, so a refusal is
        asked again for a while.
        """
        refused_until = time.monotonic() + min(FLUSH_GRACE_S, self._deadline_s)
        while True:
            try:
                await self._post("/flush_cache", {})
            except EngineError as error:
                is_busy = getattr(error.__cause__, "status", None) == _BUSY
                if not is_busy or time.monotonic() >= refused_until:
                    raise
                await asyncio.sleep(FLUSH_PAUSE_S)
            else:
                return

    async def abort(self, rid: str) -> None:
        """End a request as ``abort``; answers 200 whether or not there is one of this name."""
        await self._post("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """End all requests as ``abort``."""
        await self._post("/abort_request", {"rid": "", "abort_all": True})

    async def held_weights(self) -> HeldWeights:
        """Digests of all parameters, rank by rank."""
        answer = await self._post("/weights_checker", {"action": "checksum"}, is_load=True)
        found = self._read(answer, _Checksums)
        return HeldWeights(tuple(rank.checksums for rank in found.ranks))

    async def load_folder(self, folder: Path) -> None:
        """Load a folder's weights; how the server's first ones were loaded does not matter."""
        await self._update(
            "/update_weights_from_disk",
            {
                "model_path": str(folder),
                "load_format": "safetensors",
                "flush_cache": False,
                "abort_all_requests": False,
            },
        )

    async def join_group(self, host: str, port: int, name: str, *, world_size: int) -> None:
        """Join a gloo group as ranks 1 and up; returns when all members have come."""
        await self._update(
            "/init_weights_update_group",
            {
                "master_address": host,
                "master_port": port,
                "rank_offset": 1,
                "world_size": world_size,
                "group_name": name,
                "backend": "gloo",
            },
        )

    async def begin_update(self) -> None:
        """Open the session that tensors of a group are received in."""
        await self._update("/begin_weight_update", {})

    async def receive(self, specs: Sequence[tuple[str, str, Sequence[int]]], group: str) -> None:
        """Take (name, dtype, shape) tensors from rank 0 of a group, in this order, and load them.

        A name that the model does not have is answered with 200, too.
        """
        names, dtypes, shapes = zip(*specs, strict=True)
        await self._update(
            "/update_weights_from_distributed",
            {
                "names": names,
                "dtypes": dtypes,
                "shapes": shapes,
                "group_name": group,
                "flush_cache": False,
                "abort_all_requests": False,
            },
        )

    async def end_update(self) -> None:
        """Close the session."""
        await self._update("/end_weight_update", {})

    async def set_version(self, version: str) -> None:
        """Name the weights; the default of the endpoint would abort all requests."""
        await self._update(
            "/update_weight_version", {"new_version": version, "abort_all_requests": False}
        )

    async def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Give GPU memory back; needs an idle server started with a memory saver."""
        await self._post("/release_memory_occupation", {"tags": list(tags)}, is_load=True)

    async def resume_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take GPU memory again; what it held is gone."""
        await self._post("/resume_memory_occupation", {"tags": list(tags)}, is_load=True)

    async def _update(self, path: str, body: Mapping[str, Any]) -> None:
        found = self._read(await self._post(path, body, is_load=True), _Ended)
        if not found.success:
            raise EngineError(f"{self.url}{path}: not done: {found.message}")

    async def _post(self, path: str, body: Mapping[str, Any], *, is_load: bool = False) -> Answer:
        deadline_s = self._load_deadline_s if is_load else self._deadline_s
        return await self._call("POST", path, msgspec.json.encode(body), deadline_s)

    async def _call(self, method: str, path: str, body: bytes | None, deadline_s: float) -> Answer:
        try:
            # Waits for the server, up to the deadline.
            return await self._transport.exchange(method, self.url, path, body, deadline_s)
        except (RetryableError, GenerateApiError) as error:
            raise EngineError(str(error)) from error

    def _read(self, answer: Answer, form: type[T]) -> T:
        try:
            return self._transport.decode(answer, form)
        except GenerateApiError as error:
            raise EngineError(str(error)) from error
