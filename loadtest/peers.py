"""The same shapes over HTTP against us and against another OpenAI-compatible server, one after the other, in pairs.

Both sides are seen as their clients see them. A step's time is taken from streams that all decode at the same time; a
prompt's speed from the time to its single token. Prompts are token ids, random, and never the same twice: no prefix
cache helps.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import httpx
from rich.table import Table

STEPS = ((1, 96, 128), (8, 96, 128), (16, 96, 128))
"""(streams, prompt tokens, new tokens): a context of 160 on average."""
PROMPTS = (128, 1024)
FIRST_ID, LAST_ID = 300, 20_000
"""Ids of ordinary words in every vocabulary that is compared."""
LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Where it listens (http://HOST:PORT), what it calls its model, and fields that its requests need."""

    url: str
    model: str
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Pairs:
    """One shape. Seconds a step, or tokens a second for a prompt, of us and of the peer, pair by pair."""

    shape: str
    unit: str
    ours: list[float] = field(default_factory=list)
    peers: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Ours over the peer's, for each pair."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.peers, strict=True)]


async def server_at(url: str, **extra: object) -> Server:
    """A server and its first model. httpx.HTTPError when it does not answer."""
    async with httpx.AsyncClient(timeout=30) as client:
        reply = await client.get(f"{url.rstrip('/')}/v1/models")
        reply.raise_for_status()
        return Server(url=url.rstrip("/"), model=str(reply.json()["data"][0]["id"]), extra=extra)


async def compare(
    ours: Server, peer: Server, pairs: int, *, progress: Callable[[str], None] = lambda line: None, seed: int = 0
) -> list[Pairs]:
    """Runs every shape `pairs` times on both sides, the first side changing from pair to pair, after a warm-up.
    `progress` is told each number.
    """
    numbers = random.Random(seed)
    results = [Pairs(shape=f"step, {n} × 160", unit="ms") for n, _, _ in STEPS]
    results += [Pairs(shape=f"prefill {tokens:,}", unit="tokens/s") for tokens in PROMPTS]
    for server in (ours, peer):
        await _step_s(server, 2, 16, 8, numbers)
        await _prompt_rate(server, 64, numbers)
    for pair in range(pairs):
        for server in (ours, peer) if pair % 2 == 0 else (peer, ours):
            name = "ours" if server is ours else "peer"
            for at, result in enumerate(results):
                if at < len(STEPS):
                    value = await _step_s(server, *STEPS[at], numbers) * 1e3
                else:
                    value = await _prompt_rate(server, PROMPTS[at - len(STEPS)], numbers)
                (result.ours if server is ours else result.peers).append(value)
                progress(f"pair {pair + 1}, {name}: {result.shape}: {value:.1f} {result.unit}")
    return results


def table(results: Sequence[Pairs], peer: Server) -> Table:
    """Medians, and the ratio's median with its smallest and largest pair."""
    made = Table(title=f"ours against {peer.model} at {peer.url}, over HTTP")
    for name in ("shape", "ours", "peer", "unit", "ours ÷ peer", "least", "most"):
        made.add_column(name, justify="right")
    for each in results:
        ratios = each.ratios
        numbers = (f"{median(ratios):.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}")
        made.add_row(each.shape, f"{median(each.ours):.1f}", f"{median(each.peers):.1f}", each.unit, *numbers)
    return made


async def _step_s(server: Server, streams: int, prompt: int, new: int, numbers: random.Random) -> float:
    """Time of one step while all streams decode: from the last one's first token to the first one's last token."""
    prompts = [numbers.choices(range(FIRST_ID, LAST_ID), k=prompt) for _ in range(streams)]
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        streamed = await asyncio.gather(*(arrivals(client, server, ids, new) for ids in prompts))
    # An answer of control tokens alone shows nothing.
    streamed = [times for times in streamed if len(times) > 1]
    if not streamed:
        raise httpx.DecodingError(f"{server.url} streamed no text")
    begin_s, end_s = max(times[0] for times in streamed), min(times[-1] for times in streamed)
    if end_s <= begin_s:
        raise httpx.DecodingError(f"{server.url} did not answer {streams} requests at the same time")
    # A message may carry several tokens, or none that can be shown yet: what counts is their share of the whole answer.
    tokens = [new / len(times) * sum(begin_s < at_s <= end_s for at_s in times) for times in streamed]
    return (end_s - begin_s) / (sum(tokens) / len(streamed))


async def _prompt_rate(server: Server, tokens: int, numbers: random.Random) -> float:
    ids = numbers.choices(range(FIRST_ID, LAST_ID), k=tokens)
    begin_s = time.perf_counter()
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        times = await arrivals(client, server, ids, 1)
    return tokens / (times[-1] - begin_s)


async def arrivals(client: httpx.AsyncClient, server: Server, prompt: Sequence[int], new: int) -> list[float]:
    """When each message with text came, in seconds of the performance counter; at least the end of the answer."""
    body = {"model": server.model, "prompt": list(prompt), "max_tokens": new, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, **server.extra}
    times: list[float] = []
    async with client.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise httpx.HTTPStatusError((await reply.aread()).decode(), request=reply.request, response=reply)
        async for line in _lines(reply):
            choices = json.loads(line).get("choices") or [{}]
            if choices[0].get("text"):
                times.append(time.perf_counter())
    return times or [time.perf_counter()]


async def _lines(reply: httpx.Response) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield line.removeprefix("data: ")
