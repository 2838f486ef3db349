"""A proxy before a gateway that loses responses: the gateway has carried the call out, and its caller never hears."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

PASSED_ON = ("content-type", "authorization", "accept", "range")


class LossyProxy:
    """`loses(path, number)`: whether the response of call `number`, from 0, is lost. `is_away`: nothing passes."""

    def __init__(self, upstream: str, loses: Callable[[str, int], bool]) -> None:
        self.calls: list[tuple[str, bytes]] = []  # path and body of each, in the order in which they came
        self.ranges: list[str] = []  # the header Range of each
        self.lost: list[tuple[str, bytes]] = []
        self.is_away = False
        self._lock, self._loses = threading.Lock(), loses
        self._client = httpx.Client(base_url=upstream, timeout=60.0)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy._pass_on(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        with self._lock:
            number, call = len(self.calls), (handler.path, body)
            self.calls.append(call)
            self.ranges.append(handler.headers.get("range", ""))
        if self.is_away:
            handler.close_connection = True
            return
        headers = {name: handler.headers[name] for name in PASSED_ON if name in handler.headers}
        try:
            response = self._client.request(handler.command, handler.path, content=body, headers=headers)
        except httpx.TransportError:
            handler.close_connection = True
            return
        if self._loses(handler.path, number):
            self.lost.append(call)
            handler.close_connection = True
            return
        handler.send_response(response.status_code)
        for name in ("content-type", "retry-after"):
            if name in response.headers:
                handler.send_header(name, response.headers[name])
        handler.send_header("content-length", str(len(response.content)))
        handler.end_headers()
        handler.wfile.write(response.content)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._client.close()
