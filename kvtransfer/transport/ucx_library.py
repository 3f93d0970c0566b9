"""One narrow face for ucxx and for its predecessor ucp: exactly the calls that the ucx transport makes.

Nothing in here may be cancelled while it waits: the coroutines belong into tasks that nobody cancels.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Final, Protocol, cast

from kvtransfer.device import Buffer
from kvtransfer.errors import TransportUnavailable
from kvtransfer.transport import ucx_lanes

log = logging.getLogger(__name__)

_SIOCGIFADDR: Final = 0x8915

# Measured on loopback: 1.8 GB/s instead of 1.0 for large messages.
_TCP_OPTIONS: Final = {
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "1M",
    "TCP_SNDBUF": "4M",
    "TCP_RCVBUF": "4M",
}


class Failed(Exception):
    """UCX failed an operation; its connection is not to be used again."""


class Oversized(Failed):
    """A message was longer than the receive that it matched."""


class _Endpoint(Protocol):
    """What ucxx and ucp call an endpoint."""

    def send(self, buffer: Buffer, tag: int, force_tag: bool) -> Awaitable[None]: ...
    def recv(self, buffer: Buffer, tag: int, force_tag: bool) -> Awaitable[None]: ...
    def abort(self) -> None: ...
    @property
    def closed(self) -> bool | Callable[[], bool]: ...
    @property
    def ucp_endpoint(self) -> int: ...
    def get_ucp_endpoint(self) -> int: ...


class RawEndpoint:
    """An endpoint of either library."""

    def __init__(self, library: Library, endpoint: _Endpoint) -> None:
        self._library = library
        self._endpoint: _Endpoint | None = endpoint

    @property
    def alive(self) -> bool:
        """False after an abort, an error, or the peer's death as far as UCX knows."""
        return self._endpoint is not None and not self._library.closed(self._endpoint)

    async def send(self, buffer: Buffer, tag: int) -> None:
        """Sends. Failed, Oversized."""
        await self._library.translate(self._open().send(buffer, tag=tag, force_tag=True))
        if not self.alive:  # the library passes over a send that was cancelled by the peer's death
            raise Failed("the endpoint closed while sending")

    async def receive(self, buffer: Buffer, tag: int) -> None:
        """Receives. Failed, Oversized."""
        await self._library.translate(self._open().recv(buffer, tag=tag, force_tag=True))

    def lanes(self) -> str:
        """Transport and device of every lane; where UCX cannot be asked, the transports that may be in use."""
        asked = ucx_lanes.lanes(self._library.handle(self._open())) if self.alive else ()
        return ",".join(asked or sorted(self._library.transports()))

    def abort(self) -> None:
        """Closes at once. Blocks for up to seconds: not for the event loop."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.abort()

    def _open(self) -> _Endpoint:
        if self._endpoint is None:
            raise Failed("the endpoint is aborted")
        return self._endpoint


class Library:
    """The library, initialized for this process and event loop."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._is_ucxx = module.__name__ == "ucxx"
        errors = importlib.import_module(f"{module.__name__}.exceptions")
        self._failures = _classes(
            errors, "UCXError", "UCXBaseException", "UCXCanceled", "UCXCloseError", "UCXConnectionReset"
        )
        self._oversized = _classes(errors, "UCXMessageTruncatedError", "UCXMsgTruncated")
        self.address: Final = bytes(module.get_worker_address())

    def transports(self) -> set[str]:
        """Names of the UCX transports that may be in use."""
        return cast("set[str]", self._module.get_active_transports())

    async def connect(self, worker_address: bytes) -> RawEndpoint:
        """Makes an endpoint with error handling. Failed: nobody is there. The address must be a real one: UCX trusts
        it.
        """
        address = self._module.get_ucx_address_from_buffer(worker_address)
        work = self._module.create_endpoint_from_worker_address(address, endpoint_error_handling=True)
        return RawEndpoint(self, cast("_Endpoint", await self.translate(work)))

    async def receive(self, buffer: Buffer, tag: int) -> None:
        """Receives from any peer. Failed, Oversized."""
        argument = self._module.types.Tag(tag) if self._is_ucxx else tag
        await self.translate(self._module.recv(buffer, argument))

    async def translate(self, work: Awaitable[object]) -> object:
        """Awaits a call into the library and turns its errors into Failed and Oversized."""
        try:
            return await work
        except self._oversized as error:
            raise Oversized(str(error)) from error
        except self._failures as error:
            raise Failed(str(error) or type(error).__name__) from error

    def closed(self, endpoint: _Endpoint) -> bool:
        """A property in ucxx, a method in ucp."""
        state = endpoint.closed
        return state if isinstance(state, bool) else state()

    def handle(self, endpoint: _Endpoint) -> int:
        """UCX's own endpoint, a ucp_ep_h: a property in ucxx, a method in ucp."""
        return endpoint.ucp_endpoint if self._is_ucxx else endpoint.get_ucp_endpoint()

    def close(self) -> None:
        """Ends the library's threads and frees its context, so that the process can exit. Blocks for a second."""
        try:
            gc.collect()  # endpoints in reference cycles hold the context
            self._module.reset()
        except self._failures as error:
            log.debug("the UCX context is not freed yet: %s", error)


def open_library(*, host: str, cuda: bool) -> Library:
    """Imports and initializes ucxx, or ucp where there is no ucxx. TransportUnavailable, with one line, when that
    fails.
    """
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    module = _import_first("ucxx", "ucp")
    options = _options(host=host, cuda=cuda)
    try:
        if module.__name__ == "ucxx":
            # The progress thread begins by importing this, and while it does, making an endpoint blocks.
            with contextlib.suppress(ImportError):
                importlib.import_module("cuda.core")
            # Any other mode spins a core, or answers ten times later.
            module.init(options=options, env_takes_precedence=True, progress_mode="thread", enable_python_future=True)
        else:
            module.init(options=options, env_takes_precedence=True)
        return Library(module)
    except Exception as error:
        raise TransportUnavailable(
            f"UCX cannot be initialized ({error}); UCX_TLS={os.environ.get('UCX_TLS', options.get('TLS', 'default'))}, "
            f"UCX_NET_DEVICES={os.environ.get('UCX_NET_DEVICES', options.get('NET_DEVICES', 'all'))}"
        ) from error


def _options(*, host: str, cuda: bool) -> dict[str, str]:
    """Our settings; the environment wins. On a GPU every transport and RDMA device may serve, but loopback stays so."""
    options = dict(_TCP_OPTIONS)
    only_tcp = not cuda and "UCX_TLS" not in os.environ
    if only_tcp:
        options["TLS"] = "tcp"
    if host not in ("0.0.0.0", "::"):
        address = _address_of(host)
        if only_tcp or address.startswith("127."):
            options["NET_DEVICES"] = device_of(address)
    return options


def _address_of(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise TransportUnavailable(f"the host {host} has no address: {error}") from error


def device_of(address: str) -> str:
    """The network device that has this IPv4 address. TransportUnavailable: none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # a device without an IPv4 address
            own = socket.inet_ntoa(packed[20:24])
            if own == address or (own.startswith("127.") and address.startswith("127.")):
                return name
    raise TransportUnavailable(f"no network device has the address {address}")


def _import_first(*names: str) -> ModuleType:
    reasons = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    raise TransportUnavailable(f"no UCX library can be imported ({'; '.join(reasons)})")


def _classes(module: ModuleType, *names: str) -> tuple[type[Exception], ...]:
    """Those of the named exception classes that this library has."""
    return tuple(vars(module)[name] for name in names if name in vars(module))
