"""`python -m services.prefill`: starts one prefill worker."""

from __future__ import annotations

from functools import partial

from services.config import load
from services.prefill.config import PrefillConfig
from services.runtime import importing, run


def main() -> None:
    """Reads the configuration, which fails at once if it must, and only then what takes seconds to import."""
    config = load(PrefillConfig, "prefill", "Computes prompts in chunks and hands their KV to decode workers.")
    with importing():
        from services.prefill.worker import serve_worker
    run("prefill", partial(serve_worker, config))


if __name__ == "__main__":
    main()
