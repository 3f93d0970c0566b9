"""A sending worker in its own process, for tests: reads commands from stdin, writes one JSON line for each answer.

Its control stream is stdin and stdout, too: enough to be killed in mid-transfer, which is the point.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import sys

import numpy as np

from kvtransfer import KvLayout, Open, Posted, Sender, TransferError, UcxTransport
from kvtransfer.compression import Allowed
from kvtransfer.device import Arena
from kvtransfer.messages import Accepted, Acknowledge, Finished, Message, Sent

TYPES = {each.__name__: each for each in (Open, Posted, Acknowledge, Accepted, Sent, Finished)}


def to_json(message: Message) -> str:
    values = dataclasses.asdict(message)
    if "data_address" in values:
        values["data_address"] = values["data_address"].hex()
    return json.dumps({"type": type(message).__name__, "values": values})


def from_json(line: str) -> Message:
    item = json.loads(line)
    values = item["values"]
    if "layout" in values:
        values["layout"] = KvLayout(**values["layout"])
    if "allowed" in values:
        values["allowed"] = Allowed(**values["allowed"])
    if "data_address" in values:
        values["data_address"] = bytes.fromhex(values["data_address"])
    return TYPES[item["type"]](**values)


class LineControl:
    """A control stream over a pair of pipes."""

    def __init__(self, reader: asyncio.StreamReader, write) -> None:
        self._reader, self._write = reader, write

    async def send(self, message: Message) -> None:
        self._write((to_json(message) + "\n").encode())

    async def receive(self) -> Message | None:
        line = "["
        while line.startswith("["):  # UCX logs to stdout
            line = (await self._reader.readline()).decode().strip()
        return from_json(line) if line and line != "null" else None

    async def close(self) -> None:
        self._write(b"null\n")

    async def aclose(self) -> None:
        pass


async def main() -> None:
    options = json.loads(sys.argv[1])
    layout = KvLayout(**options["layout"])
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    def write(content: bytes) -> None:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()

    transport = UcxTransport(options["incarnation"])
    await transport.start()
    tokens, size = options["tokens"], layout.block_tokens
    arena = Arena(layout, -(-tokens // size))
    arena.array[...] = np.random.default_rng(5).integers(0, 60_000, arena.array.shape)
    sender = Sender(transport, arena, incarnation=options["incarnation"], checksums=options["checksums"])
    offer = sender.offer("t", tokens, range(arena.blocks), 20.0, lambda _: None)
    offer.advance(options["computed"])
    if options["computed"] == tokens:
        offer.finish(11)
    write(b"ready\n")
    try:
        await sender.serve(LineControl(reader, write), 20.0)
    except TransferError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    result = {"bytes_sent": transport.counters.bytes_sent, "hash": hashlib.sha256(arena.array).hexdigest()}
    write((json.dumps(result) + "\n").encode())
    await sender.aclose()
    await transport.aclose()


if __name__ == "__main__":
    asyncio.run(main())
