"""HTTP to engines, the router and reward services: the one place that knows the library below (aiohttp, decision 0031).

A connection is kept after its response and used again, so that one client asks N servers over N connections in the
long run. Nothing is sent twice, except when a caller allows it: a GET on a kept connection that its server has closed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TypeVar

import aiohttp

Result = TypeVar("Result")

CONNECT_S = 10.0
IDLE_S = 100.0
"""After which an idle connection is closed: before the engines do it (after 120 s, launch.py). One that its server
closed earlier is dropped as soon as that is heard of."""
CLOSE_S = 5.0
SHOWN_BODY = 600
UNBOUND = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)  # a call's deadline is ours; aiohttp's is 300 s


class HttpFailure(ConnectionError):
    """A call without a response: nothing listens, or the connection was closed before the end."""


class HttpUntrusted(HttpFailure):
    """A call that was not sent: the server's certificate is of no authority that this process trusts, or of another
    server. The same call again would end in the same way."""


class HttpUnreachable(HttpFailure):
    """No connection was made: nothing listens there, and nobody has had the request."""


class HttpTimeout(HttpFailure, TimeoutError):
    """A call without a response within its deadline."""


@dataclass(frozen=True, slots=True)
class Response:
    """What a server sent back."""

    status: int
    content: bytes
    content_type: str = ""
    retry_after_s: float = 0.0
    """How long the server wants the same call not to be repeated; 0 when it does not say so in seconds."""

    def described(self) -> str:
        """Return the status and the beginning of the content, for an error message."""
        return f"HTTP {self.status}: {self.content[:SHOWN_BODY].decode(errors='replace')}"


class HttpSession:
    """Calls of one event loop to any number of servers; made, used and closed on that loop.

    `headers` go with every call. `calls_at_once` to one server have a connection each, further ones wait (0: no limit).
    `is_outside`: the servers do not belong to the run, so that they may send elsewhere, and a proxy that the
    environment names may stand between. Between a run and its engines none may, and no key goes where they send it.
    """

    def __init__(
        self, *, headers: Mapping[str, str] | None = None, calls_at_once: int = 0, is_outside: bool = False
    ) -> None:
        self._is_outside = is_outside
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=calls_at_once, keepalive_timeout=IDLE_S),
            timeout=UNBOUND,
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=is_outside,
        )

    async def call(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
    ) -> Response:
        """Send JSON (or nothing) and return the response, whatever its status. HttpFailure without one.

        `deadline_s` bounds the whole call; None: the caller does.
        """
        if body is not None:
            headers = {"Content-Type": "application/json", **(headers or {})}
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._session.request(
                    method, url, data=body, headers=headers, allow_redirects=self._is_outside
                ) as response,
            ):
                wait = response.headers.get("Retry-After", "")
                wait_s = float(wait) if wait.isascii() and wait.isdecimal() and len(wait) < 6 else 0.0
                return Response(response.status, await response.read(), response.content_type, wait_s)
        except aiohttp.ClientConnectorCertificateError as error:
            raise HttpUntrusted(str(error.certificate_error)) from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise HttpTimeout(f"no response within {deadline_s:g} s") from error
            is_unreachable = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            raise (HttpUnreachable if is_unreachable else HttpFailure)(_described(error)) from error

    async def close(self) -> None:
        """Close every connection; calls in progress fail."""
        await self._session.close()
        await asyncio.sleep(0)  # transports close in the loop's next iteration


def _described(error: BaseException) -> str:
    """Return type and text of an error, those of the socket's error if there is one."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return f"{type(cause).__name__}: {cause}".rstrip(": ")


class HttpThread:
    """A session for callers without an event loop: its loop runs in one daemon thread, however many servers and callers
    there are. Made at the first call; closed by `close`, with the object, or with the process. Thread-safe."""

    def __init__(self, name: str, *, headers: Mapping[str, str] | None = None, calls_at_once: int = 0) -> None:
        self._name, self._headers, self._calls_at_once = name, headers, calls_at_once
        self._lock = threading.Lock()
        self._loop: _SessionLoop | None = None
        self._is_closed = False

    def call(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        deadline_s: float,
    ) -> Response:
        """As `HttpSession.call`."""

        def ask(session: HttpSession) -> Coroutine[None, None, Response]:
            return session.call(method, url, body, headers=headers, deadline_s=deadline_s)

        return self.run(ask, deadline_s=deadline_s)

    def run(self, ask: Callable[[HttpSession], Coroutine[None, None, Result]], *, deadline_s: float) -> Result:
        """Run `ask(session)` on the loop and return its result. It keeps `deadline_s` itself; HttpTimeout when the loop
        does not get to that, HttpFailure when the client is closed meanwhile."""
        with self._lock:
            if self._is_closed:
                raise HttpFailure(f"{self._name} is closed")
            if self._loop is None:
                self._loop = _SessionLoop(self._name, self._headers, self._calls_at_once)
                weakref.finalize(self, self._loop.close)
            future = self._loop.submit(ask)
        try:
            return future.result(deadline_s + CLOSE_S)
        except concurrent.futures.CancelledError as error:
            raise HttpFailure("the client was closed during the call") from error
        except TimeoutError as error:
            if future.done():
                raise  # the coroutine's own
            raise HttpTimeout(f"{self._name}: its event loop does not run") from error
        finally:
            future.cancel()  # Ctrl-C in the waiting thread ends the calls too; nothing happens when it is done

    def close(self) -> None:
        """Fail the calls under way, close every connection and end the thread. May be called again."""
        with self._lock:
            self._is_closed = True
            if self._loop is not None:
                self._loop.close()


class _SessionLoop:
    """The thread of a HttpThread.

    It *consumes* the coroutines of `submit`, *waits for* sockets, and is *unblocked by* `close`.
    """

    def __init__(self, name: str, headers: Mapping[str, str] | None, calls_at_once: int) -> None:
        self._headers, self._calls_at_once = headers, calls_at_once
        self._loop = asyncio.new_event_loop()
        self._session: HttpSession | None = None  # made, used and closed by the thread
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, ask: Callable[[HttpSession], Coroutine[None, None, Result]]) -> concurrent.futures.Future[Result]:
        async def asked() -> Result:
            if self._session is None:
                self._session = HttpSession(headers=self._headers, calls_at_once=self._calls_at_once)
            return await ask(self._session)

        return asyncio.run_coroutine_threadsafe(asked(), self._loop)

    def close(self) -> None:
        """Close; a second call does nothing."""
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
