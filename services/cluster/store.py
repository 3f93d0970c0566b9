"""The connection to Redis or Valkey, and the named Lua scripts beside this file. The only module that imports `redis`.

Every operation waits OPERATION_S at most for a connection, and as long for its reply. All scripts are safe to run
twice, so a broken connection is tried once more.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.errors import DiptychError, StartError

CONNECT_S = 1.0
OPERATION_S = 2.0
CONNECTIONS = 16
"""Redis does one thing at a time: more of them only hold sockets. Subscriptions have one of them each."""
_LISTEN_S = 5.0

Argument = str | int
T = TypeVar("T")
Reply = str | int | None | list["Reply"]

_SCRIPTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.lua"))}
_DIGESTS = {name: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for name, text in _SCRIPTS.items()}


class StoreUnavailable(DiptychError):
    """Redis did not answer, or refused. Nothing is known about whether the operation took place."""

    code: ClassVar[str] = "UNAVAILABLE"
    retryable: ClassVar[bool] = True


class Store:
    """CONNECTIONS connections to one Redis at most. Opens them on first use, again after every loss."""

    def __init__(self, url: str) -> None:
        """`url`: redis://, rediss:// or unix://. Raises StartError when it is none of them."""
        self._url = hide_password(url)
        self._available = True
        try:
            pool = redis.asyncio.BlockingConnectionPool.from_url(
                url,
                max_connections=CONNECTIONS,
                timeout=OPERATION_S,
                protocol=2,
                decode_responses=True,
                socket_connect_timeout=CONNECT_S,
                socket_timeout=OPERATION_S,
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,)),
            )
        except ValueError:
            raise StartError(f"redis: {self._url} is not a redis://, rediss:// or unix:// URL") from None
        self._client = redis.asyncio.Redis.from_pool(pool)

    @property
    def url(self) -> str:
        """The URL without its password, for people."""
        return self._url

    @property
    def available(self) -> bool:
        """Whether the last operation of anybody was answered; true before the first."""
        return self._available

    async def ping(self) -> None:
        """Raises StoreUnavailable unless Redis answers."""
        await self._run(["PING"])

    async def connect(self, limit_s: float = 3.0) -> None:
        """Waits until Redis answers, for a service that starts. StartError, naming the URL, after `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await self.ping()
                    except StoreUnavailable as error:
                        reason = str(error)
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise StartError(f"redis: {self._url} does not answer within {limit_s:g} s: {reason}") from None

    async def run(self, script: str, keys: Sequence[str], arguments: Sequence[Argument]) -> Reply:
        """Runs SCRIPT.lua atomically. Raises StoreUnavailable."""
        try:
            return await self._run(["EVALSHA", _DIGESTS[script], len(keys), *keys, *arguments])
        except redis.exceptions.NoScriptError:  # a new or emptied server
            return await self._run(["EVAL", _SCRIPTS[script], len(keys), *keys, *arguments])

    async def listen(self, channel: str) -> AsyncIterator[None]:
        """Yields when subscribed and after each message. Raises StoreUnavailable when the subscription is lost."""
        subscription = self._client.pubsub()
        try:
            await _to_its_end(subscription.subscribe(channel))
            while True:
                message = await subscription.get_message(timeout=_LISTEN_S)
                if message is not None:
                    yield
        except (redis.exceptions.RedisError, OSError) as error:
            raise self._unavailable(error) from error
        finally:
            await subscription.aclose()  # type: ignore[no-untyped-call]

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def _run(self, command: Sequence[Argument]) -> Reply:
        try:
            reply: Reply = await _to_its_end(self._client.execute_command(*command))  # type: ignore[no-untyped-call]
        except redis.exceptions.NoScriptError:
            raise
        except (redis.exceptions.RedisError, OSError) as error:  # also: out of memory, read-only, wrong password
            self._available = False
            raise self._unavailable(error) from error
        self._available = True
        return reply

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"Redis at {self._url}: {error or type(error).__name__}")


async def _to_its_end(operation: Awaitable[T]) -> T:
    """Awaits an operation; a cancellation is passed on only after the operation has ended.

    redis-py sends with `asyncio.wait_for`, which before Python 3.12 can lose a cancellation: the caller would go on as
    if nobody had cancelled it. And what a cancelled caller does next, leaving the line, must reach Redis last.
    """
    task = asyncio.ensure_future(operation)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])  # ends by its own socket timeout
        if not task.cancelled():
            task.exception()  # nobody else will look
        raise


def hide_password(url: str) -> str:
    """The URL with its password replaced by ***."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user = parts.username or ""
    return urlunsplit(parts._replace(netloc=f"{user}:***@{parts.netloc.rpartition('@')[2]}"))


def strings(reply: Reply) -> list[str]:
    """A reply that is a list of strings (numbers are written out); anything else is a defect of the script."""
    if not isinstance(reply, list):
        raise TypeError(f"expected a list from Redis, got {reply!r}")
    return [str(item) for item in reply]
