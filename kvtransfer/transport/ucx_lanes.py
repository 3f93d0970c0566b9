"""Asks UCX which transports and devices an endpoint really uses: neither Python library has a call for it.

The structures are those of ucp_ep_query in ucp.h (UCX 1.12 and later), which keeps them stable by a mask of the fields
that are asked for.
"""

from __future__ import annotations

import ctypes
from typing import Final

_LIBRARY: Final = "libucp.so.0"  # in the process already: the Python library is linked against it
_ASK_FOR_TRANSPORTS: Final = 1 << 3
_MOST_LANES: Final = 16


class _Entry(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.POINTER(_Entry)),
        ("count", ctypes.c_uint),
        ("entry_bytes", ctypes.c_size_t),
    )


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("asked_for", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_address", ctypes.c_char * 128),
        ("remote_address", ctypes.c_char * 128),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    )


def lanes(endpoint: int) -> tuple[str, ...]:
    """transport/device of each lane of a live endpoint (a ucp_ep_h), sorted, each once. Empty: UCX does not tell."""
    entries = (_Entry * _MOST_LANES)()
    asked = _Attributes(asked_for=_ASK_FOR_TRANSPORTS)
    asked.transports = _Transports(entries=entries, count=_MOST_LANES, entry_bytes=ctypes.sizeof(_Entry))
    try:
        query = ctypes.CDLL(_LIBRARY).ucp_ep_query
    except (OSError, AttributeError):  # linked statically, or too old
        return ()
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Attributes))
    if query(endpoint, ctypes.byref(asked)) != 0:
        return ()
    used = entries[: asked.transports.count]
    return tuple(sorted({f"{one.transport.decode()}/{one.device.decode()}" for one in used}))
