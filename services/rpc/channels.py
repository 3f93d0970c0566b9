"""Channels to other services, one per address, closed when unused."""

from __future__ import annotations

from collections import OrderedDict

import grpc.aio

from services.rpc.options import CHANNEL_OPTIONS


class Channels:
    """A bounded cache of channels by address. Least recently used ones are closed; `aclose` closes all."""

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._closing: list[grpc.aio.Channel] = []

    def to(self, address: str) -> grpc.aio.Channel:
        """The channel to HOST:PORT; opened lazily, shared by all calls."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            if len(self._channels) > self._limit:
                self._closing.append(self._channels.popitem(last=False)[1])
        self._channels.move_to_end(address)
        return channel

    async def aclose(self) -> None:
        """Closes every channel; running calls are cancelled."""
        channels = [*self._channels.values(), *self._closing]
        self._channels.clear()
        self._closing.clear()
        for channel in channels:
            await channel.close(None)
