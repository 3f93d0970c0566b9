"""The adapter over the older library, ucp, by a fake of it."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from kvtransfer import TransportUnavailable
from kvtransfer.transport import ucx_library


class FakeError(Exception):
    pass


class FakeTruncated(FakeError):
    pass


class FakeEndpoint:
    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.is_closed = False
        self.error: Exception | None = None

    async def send(self, buffer, tag, force_tag) -> None:
        self.calls.append(("send", tag, force_tag))
        if self.error:
            raise self.error

    async def recv(self, buffer, tag, force_tag) -> None:
        self.calls.append(("recv", tag, force_tag))
        if self.error:
            raise self.error

    def closed(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_closed = True


@pytest.fixture
def ucp(monkeypatch):
    """Only ucp can be imported."""
    module, errors = ModuleType("ucp"), ModuleType("ucp.exceptions")
    errors.UCXError, errors.UCXMsgTruncated = FakeError, FakeTruncated
    module.inits, module.endpoint, module.received = [], FakeEndpoint(), []

    def init(options, env_takes_precedence):
        module.inits.append((options, env_takes_precedence))

    async def connect(address, endpoint_error_handling):
        assert (address, endpoint_error_handling) == (("address", b"peer"), True)
        return module.endpoint

    async def recv(buffer, tag):
        module.received.append(tag)

    module.init, module.recv, module.create_endpoint_from_worker_address = init, recv, connect
    module.get_worker_address = lambda: bytearray(b"own")
    module.get_ucx_address_from_buffer = lambda buffer: ("address", buffer)
    monkeypatch.setitem(sys.modules, "ucxx", None)
    monkeypatch.setitem(sys.modules, "ucp", module)
    monkeypatch.setitem(sys.modules, "ucp.exceptions", errors)
    return module


async def test_ucp_serves_where_ucxx_is_missing(ucp):
    library = ucx_library.open_library(host="127.0.0.1", cuda=False)
    ((options, env_takes_precedence),) = ucp.inits
    assert (options["TLS"], options["NET_DEVICES"], env_takes_precedence) == ("tcp", "lo", True)
    assert library.address == b"own"
    endpoint = await library.connect(b"peer")
    buffer = np.zeros(1, np.uint8)
    await endpoint.send(buffer, 5)
    await endpoint.receive(buffer, 6)
    await library.receive(buffer, 7)
    assert ucp.endpoint.calls == [("send", 5, True), ("recv", 6, True)]
    assert ucp.received == [7]
    assert endpoint.alive


async def test_errors_are_told_apart(ucp):
    library = ucx_library.open_library(host="127.0.0.1", cuda=False)
    endpoint = await library.connect(b"peer")
    ucp.endpoint.error = FakeTruncated("long")
    with pytest.raises(ucx_library.Oversized):
        await endpoint.receive(np.zeros(1, np.uint8), 1)
    ucp.endpoint.error = FakeError("reset")
    with pytest.raises(ucx_library.Failed, match="reset"):
        await endpoint.send(np.zeros(1, np.uint8), 1)


async def test_a_send_that_the_library_passed_over_is_a_failure(ucp):
    library = ucx_library.open_library(host="127.0.0.1", cuda=False)
    endpoint = await library.connect(b"peer")
    ucp.endpoint.is_closed = True
    with pytest.raises(ucx_library.Failed):
        await endpoint.send(np.zeros(1, np.uint8), 1)


async def test_an_aborted_endpoint_is_dead(ucp):
    library = ucx_library.open_library(host="127.0.0.1", cuda=False)
    endpoint = await library.connect(b"peer")
    endpoint.abort()
    endpoint.abort()
    assert not endpoint.alive
    with pytest.raises(ucx_library.Failed):
        await endpoint.send(np.zeros(1, np.uint8), 1)


def test_no_library_at_all_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "ucxx", None)
    monkeypatch.setitem(sys.modules, "ucp", None)
    with pytest.raises(TransportUnavailable, match="no UCX library can be imported"):
        ucx_library.open_library(host="127.0.0.1", cuda=False)


def test_a_foreign_host_is_said():
    with pytest.raises(TransportUnavailable, match=r"203\.0\.113\.9"):
        ucx_library.device_of("203.0.113.9")


@pytest.mark.parametrize(
    ("host", "cuda", "tls", "restricted"),
    [
        ("127.0.0.1", False, None, True),
        ("localhost", False, None, True),  # a name: inside containers services are known by names
        ("localhost", True, None, True),  # loopback stays loopback, also where RDMA is there
        ("localhost", False, "rc", True),
        ("0.0.0.0", False, None, False),
        ("0.0.0.0", True, None, False),
    ],
)
def test_the_network_device_follows_the_host(ucp, monkeypatch, host, cuda, tls, restricted):
    monkeypatch.delenv("UCX_TLS", raising=False)
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    ucx_library.open_library(host=host, cuda=cuda)
    ((options, _),) = ucp.inits
    assert (options.get("NET_DEVICES") == "lo") == restricted
    assert (options.get("TLS") == "tcp") == (not cuda and not tls)


def test_a_host_without_an_address_is_said(ucp):
    with pytest.raises(TransportUnavailable, match="no-such-host"):
        ucx_library.open_library(host="no-such-host.invalid", cuda=False)
