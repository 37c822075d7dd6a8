"""The rollout engine on SGLang: one server of its own, tokens in, tokens out; torch-free.

    generate      checked here (a foreign id would end the server) -> rows of the embedding ->
                  /generate -> real ids; cancelled or late: aborted at the server, too
    load_weights  wait for running requests, or not (``in_flight``) -> pause -> load -> digests of
                  what the server then holds -> flush -> name the version -> ask for it -> go on
    server gone   requests raise ``EngineLostError``; the next load starts it anew

New requests wait while weights are loaded. A load that fails half way leaves a server that may hold
anything: it is ended, and ``weight_version`` is -1 until another load has been confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from miniverl_dist.backends.megatron.architecture import Architecture, read_architecture
from miniverl_dist.backends.vocabulary import AnyVocabulary
from miniverl_dist.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineLostError,
    MalformedReplyError,
    PublishError,
    RequestRejectedError,
    ServerUnavailableError,
)
from miniverl_dist.generate_api.breaker import BreakerLimits
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest
from miniverl_dist.ports import WeightSnapshot
from rollout_server.engines.jobs import Job, accept
from rollout_server.engines.sglang_control import MEMORY_TAGS
from rollout_server.engines.sglang_layout import check_tensors
from rollout_server.engines.sglang_publish import publisher_of
from rollout_server.engines.sglang_server import SGLangLaunch, SGLangServer

MAX_RETRIES = 2
"""Of a request whose connection broke: an idle one may be closed just as it is used again."""
RETRY_BACKOFF_S = 0.2
ABORT_INTERVAL_S = 0.2
UNBOUNDED_TOKENS = 2**62
"""In flight: the server's own queue decides."""
NO_BREAKER = BreakerLimits(
    failures_in_a_row=UNBOUNDED_TOKENS, failure_share=1.0, window=UNBOUNDED_TOKENS
)
"""There is one server, and its process says whether it lives."""
DEATH_SEEN_S = 2.0
SMALLEST_TEMPERATURE = 1e-6
"""Below it SGLang 0.5.23 takes the likeliest token, and reports log-probabilities at temperature 1;
at 0 so does every engine."""


class SGLangEngine:
    """Samples from a server of its own; see ``rollout_server.engines.base.Engine``.

    Args:
        launch: Of the server; a model with a shorter context than its ``max_context_tokens`` has
            its own.
        vocabulary: The real ids that the softmax covers, in the order of the embedding's rows.
        name: Names the engine in receipts and events.
        request_deadline_s: For one request (``deadlines.generate_s``).

    Raises:
        ConfigError: the model is unsupported, or has other rows than the vocabulary.
    """

    def __init__(
        self,
        launch: SGLangLaunch,
        vocabulary: AnyVocabulary,
        *,
        name: str = "sglang-0",
        request_deadline_s: float = 600.0,
    ) -> None:
        self.name, self.weight_version = name, -1
        self._arch = _checked_architecture(launch.config_file, vocabulary)
        longest = min(launch.max_context_tokens, self._arch.max_positions)
        self._launch = replace(launch, max_context_tokens=longest)
        self._vocabulary, self._config = vocabulary, launch.config
        self._request_deadline_s = request_deadline_s
        self._server = SGLangServer(self._launch, name)
        self._publisher = publisher_of(launch.config, self._arch, name, launch.work_dir)
        self._client: GenerateClient | None = None
        self._rids: set[str] = set()
        """Of the requests at the server."""
        self._quiet, self._open = asyncio.Event(), asyncio.Event()
        self._quiet.set()
        self._open.set()
        self._loading = asyncio.Lock()
        self._aborts: set[asyncio.Task[None]] = set()
        self._released: frozenset[str] = frozenset()
        self._is_closed = False
        self._num_requests = 0

    @property
    def server(self) -> SGLangServer:
        """The process behind the engine."""
        return self._server

    @property
    def num_running(self) -> int:
        """Requests at the server."""
        return len(self._rids)

    async def start(self) -> None:
        """Start the server unless it runs; the first load would do so, too.

        Raises:
            EngineError: it ended again, or the engine is closed.
            DeadlineError: it was not ready within ``start_deadline_s``.
        """
        async with self._loading:
            await self._ensure_started()

    async def restart(self, snapshot: WeightSnapshot) -> str:
        """End the server, start it anew with these weights; see ``load_weights``."""
        async with self._loading:
            await self._discard_server()
        return await self.load_weights(snapshot)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """See ``Engine``.

        Raises:
            EngineLostError: the server is gone; another engine, or this one after the next load,
                can answer.
            DeadlineError: no answer in time; the request has been aborted.
        """
        self._check_usable()
        _check_temperature(request.sampling_params.temperature)
        self._num_requests += 1
        job = accept(
            request,
            self._vocabulary,
            Job,
            max_context_tokens=self._launch.max_context_tokens,
            engine=self.name,
            default_rid=f"{self.name}-{self._num_requests}",
        )
        # Closed while weights are loaded, which has its own deadlines.
        await self._open.wait()
        if self._is_closed:
            return self._aborted(job)
        self._check_usable()
        if job.rid in self._rids:
            raise RequestRejectedError(f"rid {job.rid!r} is already in use at engine {self.name}")
        self._rids.add(job.rid)
        self._quiet.clear()
        try:
            return self._in_real_ids(job, await self._ask(job))
        finally:
            self._rids.discard(job.rid)
            if not self._rids:
                self._quiet.set()

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        """See ``Engine``; with ``in_flight: continue`` running requests go on under new weights."""
        async with self._loading:
            self._check_loadable(snapshot)
            async with self._requests_waiting():
                try:
                    await self._ensure_started()
                except (EngineError, DeadlineError) as error:
                    raise PublishError(f"engine {self.name} cannot be started: {error}") from error
                if self._config.in_flight == "finish":
                    # Waits for running requests, each of which has a deadline.
                    await self._quiet.wait()
                async with self._ended_on_failure():
                    checksum = await self._take(snapshot)
        self.weight_version = snapshot.policy_version
        return checksum

    async def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Let running requests finish, then give the server's GPU memory back.

        Raises:
            EngineError: the server did not; it has been ended.
        """
        async with self._loading, self._requests_waiting():
            # Waits for running requests, each of which has a deadline.
            await self._quiet.wait()
            async with self._ended_on_failure():
                await self._server.control.release_memory(tags)
            self._released |= frozenset(tags)
            if "weights" in tags:
                self.weight_version = -1

    async def resume_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take the memory again; weights come by the next load.

        Raises:
            EngineError: the server did not; it has been ended.
        """
        async with self._loading:
            async with self._ended_on_failure():
                await self._server.control.resume_memory(tags)
            self._released -= frozenset(tags)

    async def close(self) -> None:
        """See ``Engine``."""
        self._is_closed = True
        self._open.set()
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(self._config.control_deadline_s):
                await self._abort_until_quiet()
        await self._server.stop()
        # Waits for a load that the end of the server has just made fail.
        async with self._loading:
            await self._discard_server()
        await asyncio.gather(*self._aborts)

    async def _abort_until_quiet(self) -> None:
        while self._rids:
            # Again, for requests that were on their way when the server was told.
            await self._server.control.abort_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_INTERVAL_S):
                    await self._quiet.wait()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise EngineError(f"engine {self.name} is closed")
        if self._released:
            raise EngineError(
                f"engine {self.name} has given back {', '.join(sorted(self._released))}: "
                "resume_memory comes first"
            )
        if self.weight_version < 0:
            raise EngineError(f"engine {self.name} holds no weights yet: load_weights comes first")
        if not self._server.is_alive:
            raise self._lost()

    def _check_loadable(self, snapshot: WeightSnapshot) -> None:
        if self._is_closed:
            raise PublishError(f"engine {self.name} is closed")
        if "weights" in self._released:
            raise PublishError(
                f"engine {self.name} has given the memory of its weights back: resume_memory first"
            )
        try:
            check_tensors(self._arch, snapshot.tensors, self._launch.dtype)
        except PublishError as error:
            raise PublishError(
                f"engine {self.name} cannot take the weights of policy version "
                f"{snapshot.policy_version}: {error}"
            ) from error

    def _lost(self) -> EngineLostError:
        return EngineLostError(
            f"the server of engine {self.name} has ended; the end of its log:\n"
            f"{self._server.log_tail() or '(empty)'}"
        )

    async def _ensure_started(self) -> None:
        if self._is_closed:
            raise EngineError(f"engine {self.name} is closed")
        if self._server.is_alive:
            return
        await self._discard_server()
        await self._server.start()
        self._client = GenerateClient(
            self._server.control.url,
            limits=ClientLimits(
                deadline_s=self._request_deadline_s,
                request_deadline_s=self._request_deadline_s,
                request_deadline_s_per_1k_tokens=0.0,
                max_retries=MAX_RETRIES,
                retry_backoff_s=RETRY_BACKOFF_S,
                max_inflight_tokens=UNBOUNDED_TOKENS,
                breaker=NO_BREAKER,
            ),
        )

    async def _discard_server(self) -> None:
        self.weight_version = -1
        self._released = frozenset()
        self._publisher.forget_server()
        await self._server.stop()
        if self._client is not None:
            await self._client.close()

    @asynccontextmanager
    async def _requests_waiting(self) -> AsyncIterator[None]:
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    @asynccontextmanager
    async def _ended_on_failure(self) -> AsyncIterator[None]:
        """A server that may hold anything must answer nobody."""
        try:
            yield
        except BaseException:
            await self._discard_server()
            raise

    async def _take(self, snapshot: WeightSnapshot) -> str:
        control = self._server.control
        # Bounded by the control deadline of each of them.
        await asyncio.gather(*self._aborts)
        try:
            await control.pause()
            checksum = await self._publisher.put(control, snapshot)
            await control.resume()
        except PublishError:
            raise
        except EngineError as error:
            raise PublishError(
                f"engine {self.name} did not take policy version {snapshot.policy_version}: "
                f"{error}; its server is ended, the next publish starts it anew"
            ) from error
        return checksum

    async def _ask(self, job: Job) -> GenerateReply:
        assert self._client is not None  # a server is alive
        try:
            # Waits for the server, up to the request's deadline.
            return await self._client.generate(self._in_rows(job))
        except (asyncio.CancelledError, DeadlineError):
            self._abort_soon(job.rid)
            raise
        except ServerUnavailableError as error:
            if self._is_closed:
                return self._aborted(job)
            # The connections of a killed server break a moment before its process is seen to end.
            if await self._server.has_ended(within_s=DEATH_SEEN_S):
                raise self._lost() from error
            raise EngineError(f"engine {self.name} did not answer: {error}") from error
        except MalformedReplyError as error:
            # What is aborted before its first token is answered without counts.
            if self._is_closed:
                return self._aborted(job)
            raise EngineError(f"engine {self.name}: {error}") from error

    def _in_rows(self, job: Job) -> GenerateRequest:
        params = msgspec.structs.replace(
            job.params,
            # More would be refused, although the episode may well end before.
            max_new_tokens=len(job.draws),
            stop_token_ids=tuple(sorted(job.stop_rows)),
        )
        return GenerateRequest(
            input_ids=tuple(job.prompt.tolist()),
            sampling_params=params,
            return_logprob=job.return_logprob,
            rid=job.rid,
            return_routed_experts=job.return_routed_experts,
        )

    def _in_real_ids(self, job: Job, reply: GenerateReply) -> GenerateReply:
        """A reply about rows as one about ids."""
        ids = self._ids(reply.output_ids)
        meta, entries = reply.meta_info, reply.meta_info.output_token_logprobs
        if entries is not None:
            rows = self._ids([entry[1] for entry in entries])
            entries = tuple((entry[0], i, None) for entry, i in zip(entries, rows, strict=True))
        finish = meta.finish_reason
        if finish is not None and isinstance(finish.matched, int):
            finish = msgspec.structs.replace(finish, matched=self._ids([finish.matched])[0])
        meta = msgspec.structs.replace(
            meta,
            id=job.rid,
            finish_reason=finish,
            input_token_logprobs=None,
            output_token_logprobs=entries if job.return_logprob else None,
        )
        return GenerateReply(meta_info=meta, output_ids=ids)

    def _ids(self, rows: Sequence[int]) -> tuple[int, ...]:
        held = np.array(rows, dtype=np.int64)
        if ((held < 0) | (held >= len(self._vocabulary))).any():
            raise EngineError(
                f"engine {self.name} answered with row {held.max()} of {len(self._vocabulary)}"
            )
        return tuple(self._vocabulary.ids[held].tolist())

    def _aborted(self, job: Job) -> GenerateReply:
        message = f"engine {self.name} was closed"
        return job.reply("abort", self._vocabulary, self.weight_version, message)

    def _abort_soon(self, rid: str) -> None:
        """Nobody waits for it: whoever cancelled the request goes on at once."""
        task = asyncio.create_task(self._abort(rid), name=f"{self.name} abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, rid: str) -> None:
        names = [rid, *(f"{rid}_retry{number}" for number in range(1, MAX_RETRIES + 1))]
        for name in names:
            with suppress(EngineError):  # a server that is gone has nothing left to abort
                await self._server.control.abort(name)


def _check_temperature(temperature: float) -> None:
    if 0 < temperature < SMALLEST_TEMPERATURE:
        raise RequestRejectedError(
            f"sampling_params.temperature is {temperature}, expected 0 (greedy) or at least "
            f"{SMALLEST_TEMPERATURE}: SGLang would decode greedily in between"
        )


def _checked_architecture(config_file: Path, vocabulary: AnyVocabulary) -> Architecture:
    arch = read_architecture(config_file)
    if arch.vocab_size != len(vocabulary):
        raise ConfigError(
            f"the vocabulary has {len(vocabulary)} ids, but {config_file.parent.name}/config.json "
            f"gives the embedding {arch.vocab_size} rows (vocab_size): SGLang samples from all"
        )
    return arch
