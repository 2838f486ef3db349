"""HTTP calls to one server over connections that are kept, by the standard library: a fifth of httpx's CPU time."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

CONNECT_S = 10.0
IDLE_S = 4.0
"""After which an idle connection is given up: below vLLM's own 5 s, so that its server is never the first to close."""
FAILURES = (OSError, http.client.HTTPException)
"""What a call without an answer raises."""


class HttpClient:
    """One server. Thread-safe: a connection is one call's at a time. No proxy of the environment stands between."""

    def __init__(self, url: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> None:
        """`timeout_s` bounds each read and write, and connecting where it is shorter than CONNECT_S."""
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port
        self._timeout_s, self._headers = timeout_s, {"Content-Type": "application/json", **(headers or {})}
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []

    def call(self, method: str, route: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and content. One of FAILURES when there is no answer; nothing is asked twice."""
        connection = self._connection()
        try:
            connection.request(method, route, body, self._headers)
            answer = connection.getresponse()
            content = answer.read()
        except BaseException:
            connection.close()
            raise
        if answer.status == 200 and not answer.will_close:
            self._idle.append((time.monotonic(), connection))
        else:  # vLLM closes it after an error, which the next call would trip over
            connection.close()
        return answer.status, content

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    def _connection(self) -> http.client.HTTPConnection:
        while self._idle:
            since, connection = self._idle.pop()
            if time.monotonic() - since < IDLE_S:
                return connection
            connection.close()
        connection = http.client.HTTPConnection(self._host, self._port, timeout=min(CONNECT_S, self._timeout_s))
        connection.connect()
        connection.sock.settimeout(self._timeout_s)
        return connection


def status_of(url: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> int:
    """What a server answers to GET, over a connection of its own. One of FAILURES when it does not."""
    client = HttpClient(url, timeout_s=timeout_s, headers=headers)
    try:
        return client.call("GET", urlsplit(url).path)[0]
    finally:
        client.close()
