"""What the gateway is told."""

from __future__ import annotations

import dataclasses

from services.config import ServiceConfig, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """Flags and DIPTYCH_* variables of the gateway. It does not talk to Redis."""

    port: int = setting(50051, "gRPC port; 0 takes a free one.", minimum=0, maximum=65535)
    http_port: int = setting(8000, "HTTP port; 0 takes a free one.", minimum=0, maximum=65535)
    scheduler: str = setting("127.0.0.1:50052", "The scheduler, HOST:PORT.")
    model: str = setting("smollm2", "Folder or Hugging Face id of the model; smollm2 is the embedded one.")
    request_limit_s: float = setting(600.0, "Most time one request may take, in seconds.", minimum=0.001)
    expect_prefill: int = setting(0, "Prefill workers that must be ready before /ready says so.", minimum=0)
    expect_decode: int = setting(1, "Decode workers that must be ready before /ready says so.", minimum=1)
