"""`python -m services.scheduler`: decides which workers serve a request, and when."""

from __future__ import annotations

import asyncio
from functools import partial

from services.config import load
from services.runtime import run
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import serve
from services.telemetry.context import set_up_logging
from services.telemetry.tracing import set_up


def main() -> None:
    """Reads flags and variables, and serves until a signal."""
    config = load(SchedulerConfig, "scheduler", "Decides which workers serve a request, and when.")
    set_up_logging("scheduler", config.log_level)
    run("scheduler", partial(_serve, config))


async def _serve(config: SchedulerConfig, stop: asyncio.Event) -> None:
    provider = set_up("scheduler", f"scheduler-{config.port}", config.otlp)
    try:
        await serve(config, stop)
    finally:
        if provider is not None:
            await asyncio.to_thread(provider.shutdown)


if __name__ == "__main__":
    main()
