"""`python -m services.decode`: starts one decode worker."""

from __future__ import annotations

from functools import partial

from services.config import load
from services.decode.config import DecodeConfig
from services.runtime import importing, run


def main() -> None:
    """Reads the configuration, which fails at once if it must, and only then what takes seconds to import."""
    config = load(DecodeConfig, "decode", "Takes KV in, steps all running requests together, streams tokens.")
    with importing():
        from services.decode.worker import serve_worker
    run("decode", partial(serve_worker, config))


if __name__ == "__main__":
    main()
