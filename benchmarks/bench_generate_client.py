"""Claim: a request through ``GenerateClient`` costs at most 1.3x that of a bare aiohttp session.

Both ways post the same bytes on one pooled session, 64 requests in flight, and decode the reply
into the same type; the client adds its deadline, token budget, breaker, and checks of status and
content type. A third way, a session per request, shows what the pool is worth. CPU time of this
process (the server is another), rounds of the three ways in turn, medians. Exit status 1 when the
claim does not hold.

    python -m benchmarks.bench_generate_client
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import aiohttp
import msgspec

from miniverl_dist.generate_api.client import GenerateClient
from miniverl_dist.generate_api.wire import (
    GenerateReply,
    GenerateRequest,
    encode_request,
    scoring_request,
)

MAX_RATIO = 1.3
NUM_IN_FLIGHT = 64
SIZES = {"small": (32, 300, 31), "4k tokens": (4096, 64, 11)}
"""Name -> tokens of the prompt, all scored; requests in a round; rounds."""
Ask = Callable[[GenerateRequest], Awaitable[object]]


def reply_to(request: GenerateRequest) -> bytes:
    """A reply as SGLang writes one without text: the whole prompt scored, float32 values."""
    rng = random.Random(0)
    ids = request.input_ids
    entries = [[None, ids[0], None], *([-rng.expovariate(1.0), i, None] for i in ids[1:])]
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(ids),
        "completion_tokens": 0,
        "weight_version": "default",
        "input_token_logprobs": entries,
        "output_token_logprobs": [],
    }
    return msgspec.json.encode({"text": "", "output_ids": [], "meta_info": meta})


def serve(body: bytes, ready: Connection) -> None:
    """In a process of its own: answer every request with ``body``."""
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    answer = head.encode() + body

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                asked = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = asked.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0]
                await reader.readexactly(int(length))
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def round_us(ask: Ask, request: GenerateRequest, num_requests: int) -> float:
    """CPU microseconds per request of one round."""
    left = iter(range(num_requests))

    async def work() -> None:
        for _ in left:
            await ask(request)

    start = time.process_time_ns()
    await asyncio.gather(*(work() for _ in range(min(NUM_IN_FLIGHT, num_requests))))
    return (time.process_time_ns() - start) / 1e3 / num_requests


async def post(session: aiohttp.ClientSession, url: str, request: GenerateRequest) -> GenerateReply:
    """What a bare session takes: the same bytes out, the same type back."""
    async with session.post(url + "/generate", data=encode_request(request)) as response:
        return msgspec.json.decode(await response.read(), type=GenerateReply)


async def measure(
    url: str, request: GenerateRequest, num_requests: int, num_rounds: int
) -> list[list[float]]:
    """CPU microseconds per request, [rounds][client, bare session, a session per request]."""
    headers = {"Content-Type": "application/json"}

    async def alone(asked: GenerateRequest) -> GenerateReply:
        async with aiohttp.ClientSession(headers=headers) as own:
            return await post(own, url, asked)

    connector = aiohttp.TCPConnector(limit=0)
    async with (
        GenerateClient(url) as client,
        aiohttp.ClientSession(connector=connector, headers=headers) as session,
    ):
        ways: list[Ask] = [client.generate, lambda asked: post(session, url, asked), alone]
        for way in ways:  # opens the connections
            await round_us(way, request, NUM_IN_FLIGHT)
        return [
            [await round_us(way, request, num_requests) for way in ways] for _ in range(num_rounds)
        ]


def measured(name: str) -> list[list[float]]:
    """Measure one size against a server of its own."""
    num_tokens, num_requests, num_rounds = SIZES[name]
    rng = random.Random(1)
    request = scoring_request([rng.randrange(129_000) for _ in range(num_tokens)], 1)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(reply_to(request), there), daemon=True)
    process.start()
    try:
        url = f"http://127.0.0.1:{here.recv()}"
        return asyncio.run(measure(url, request, num_requests, num_rounds))
    finally:
        process.terminate()
        process.join()


def main() -> int:
    print(f"{NUM_IN_FLIGHT} in flight; CPU us per request: client   bare  session each")
    ratios = {}
    for name in SIZES:
        rounds = measured(name)
        client, bare, alone = (statistics.median(column) for column in zip(*rounds, strict=True))
        # Of each round, so that whatever else the machine does meets both ways.
        ratios[name] = statistics.median(ours / theirs for ours, theirs, _ in rounds)
        print(f"{name:>34} {client:14.0f} {bare:6.0f} {alone:13.0f}")
        print(
            f"{name:>34}: client {ratios[name]:.2f}x a bare session; "
            f"a session each {alone / bare:.2f}x"
        )
    holds = max(ratios.values()) <= MAX_RATIO
    print(f"claim (client <= {MAX_RATIO}x a bare shared session): {'holds' if holds else 'FAILS'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
