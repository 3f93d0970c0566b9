"""Prometheus metrics of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

from services.errors import DiptychError
from services.gateway.placement import Finish

__all__ = ["CONTENT_TYPE", "Metrics"]

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counts requests by outcome, tokens, and the times that a client feels. One registry per gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        register = self._registry
        self._requests = Counter(
            "diptych_requests",
            "Requests by outcome: stop, length (of the answer that ended last), or the name of an error.",
            ["outcome"],
            registry=register,
        )
        self._in_flight = Gauge("diptych_requests_in_flight", "Requests being served.", registry=register)
        self._lost = Counter("diptych_placements_lost", "Placements that lost a leg.", registry=register)
        self._tokens = Counter(
            "diptych_tokens",
            "Tokens by kind: prompt, cached (a part of prompt), completion.",
            ["kind"],
            registry=register,
        )
        self._first = Histogram(
            "diptych_time_to_first_token_seconds",
            "From arrival to the first token.",
            registry=register,
            buckets=_SECONDS,
        )
        self._gap = Histogram(
            "diptych_time_per_token_seconds",
            "Mean time between later tokens, per answer.",
            registry=register,
            buckets=_SECONDS,
        )
        self._total = Histogram(
            "diptych_request_seconds",
            "From arrival to the end of the last answer.",
            registry=register,
            buckets=_SECONDS,
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around one request: counts it while it runs, and its outcome when it fails."""
        self._in_flight.inc()
        try:
            yield
        except DiptychError as error:
            self._requests.labels(error.code).inc()
            raise
        except asyncio.CancelledError:
            self._requests.labels("CANCELLED").inc()
            raise
        except Exception:
            self._requests.labels("INTERNAL").inc()
            raise
        finally:
            self._in_flight.dec()

    def first_token(self, seconds: float) -> None:
        """A request got its first token."""
        self._first.observe(seconds)

    def placement_lost(self) -> None:
        """A placement lost a leg."""
        self._lost.inc()

    def answered(self, finish: Finish) -> None:
        """A request got a whole answer, perhaps one of several."""
        self._tokens.labels("prompt").inc(finish.usage.prompt_tokens)
        self._tokens.labels("cached").inc(finish.usage.cached_tokens)
        self._tokens.labels("completion").inc(finish.usage.completion_tokens)
        if finish.phases.time_per_token_s is not None:
            self._gap.observe(finish.phases.time_per_token_s)

    def finished(self, finish: Finish) -> None:
        """A request got its last answer."""
        self._requests.labels(finish.reason).inc()
        if finish.phases.total_s is not None:
            self._total.observe(finish.phases.total_s)

    def exposition(self) -> bytes:
        """All of it in the text format that Prometheus scrapes (`CONTENT_TYPE`)."""
        return generate_latest(self._registry)
