"""What the gateway is told."""

from __future__ import annotations

import dataclasses

from services.config import ServiceConfig, setting
from services.errors import StartError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """Flags and DIPTYCH_* variables of the gateway. It does not talk to Redis."""

    port: int = setting(50051, "gRPC port; 0 takes a free one.", minimum=0, maximum=65535)
    http_port: int = setting(8000, "HTTP port; 0 takes a free one.", minimum=0, maximum=65535)
    scheduler: str = setting("127.0.0.1:50052", "The scheduler, HOST:PORT.")
    model: str = setting("smollm2", "Folder or Hugging Face id of the model; smollm2 is the embedded one.")
    request_limit_s: float = setting(600.0, "Most time one request may take, in seconds.", minimum=0.001)
    expect: str = setting("0:1", "Prefill and decode workers that must be ready before /ready says so, PREFILL:DECODE.")


def parse_expected(text: str) -> tuple[int, int]:
    """Reads how many prefill and decode workers are expected, for example "1:2". Raises StartError."""
    prefill, _, decode = text.partition(":")
    if not (prefill.isdecimal() and decode.isdecimal() and int(decode) >= 1):
        raise StartError(f"expect: {text!r} is not PREFILL:DECODE, numbers of workers, of the latter at least 1")
    return int(prefill), int(decode)
