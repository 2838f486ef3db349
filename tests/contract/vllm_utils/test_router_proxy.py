"""Between a router and its engines no proxy may stand: it would get prompts and keys, or not reach them at all."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.helpers.engines import engine_config
from vime.backends.vllm_utils.fake import FakeEngine
from vime.backends.vllm_utils.router import RouterProcess


def test_a_real_router_asks_its_engines_without_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(502)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_port}")
    monkeypatch.setenv("no_proxy", "")
    with FakeEngine() as engine:
        router = RouterProcess(engine_config(Path("unused")), [engine.address], run_dir=tmp_path)
        router.start()
        try:
            router.wait_ready(30)
            with httpx.Client(trust_env=False) as client:
                workers = client.get(f"{router.url}/list_workers", timeout=10)
        finally:
            router.stop()
            proxy.shutdown()
            proxy.server_close()
    assert engine.address.url in workers.text, workers.text
    assert asked == []
