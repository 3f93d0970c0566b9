"""How the clients here call a mesh: a channel, and failures as one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
import grpc

from services.rpc.options import CHANNEL_OPTIONS


class CallFailed(click.ClickException):
    """A call that failed; shown as `error: CODE: message`, exit status 1."""

    def __init__(self, failure: grpc.RpcError) -> None:
        assert isinstance(failure, grpc.Call)
        super().__init__(f"{failure.code().name}: {failure.details()}")

    def show(self, file: object = None) -> None:
        """Prints the line on stderr."""
        click.echo(f"error: {self.message}", err=True)


@contextmanager
def channel_to(address: str) -> Iterator[grpc.Channel]:
    """A channel to HOST:PORT for the length of a block; a failed call in it ends the command with one line."""
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        try:
            yield channel
        except grpc.RpcError as failure:
            raise CallFailed(failure) from None
