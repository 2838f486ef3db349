"""The --agent-command of runs with the six programs: chooses one by its sample's number and loses every tenth answer.

    --agent-command "python benchmarks/agent_sdks/launch.py [DIR OF install.sh]"

The program gets the address of a proxy in this process, which passes requests on and, of one request in ten, throws the
answer away when it has it whole, so that the SDK asks again. Which one is a function of the prompt, the sample and the
request's number. Standard library only: its start is a part of each of a thousand sessions.
"""

from __future__ import annotations

import hashlib
import http.client
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parents[1] / "data" / "agent-sdks"
PROGRAMS = (
    "openai_chat.py", "anthropic_tools.py", "agents_runner.py", "pydantic_agent.py", "langgraph_react.py",
    "npm_openai.mjs",
)  # fmt: skip
ROWS = {"openai_chat.py": 2}
"""Conversations of programs that hold more than one in a session; each is a row."""
DIE_WITH_PARENT = HERE.parents[1] / "vime" / "utils" / "die_with_parent.py"
ONE_IN = 10
VARIABLE = "VIME_LOST_ANSWERS"
"""A file that gets a line for each answer that was lost."""
NOT_PASSED_ON = ("host", "content-length", "connection", "transfer-encoding", "accept-encoding")


def is_lost(*what: object) -> bool:
    return int(hashlib.sha256(repr(what).encode()).hexdigest(), 16) % ONE_IN == 0


class Proxy(http.server.ThreadingHTTPServer):
    """On a free port, before the server at `url`. The request after a lost one is never lost: it is its retry."""

    daemon_threads = True

    def __init__(self, url: str, *draw: object) -> None:
        parts = urlsplit(url)
        self.upstream, self.draw, self.count, self.was_lost = (str(parts.hostname), parts.port), draw, 0, False
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def loses_next(self) -> bool:
        with self.lock:
            self.count += 1
            self.was_lost = not self.was_lost and is_lost(*self.draw, self.count)
            return self.was_lost


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in NOT_PASSED_ON}
        upstream = http.client.HTTPConnection(*self.server.upstream)
        upstream.request("POST", self.path, content, headers)
        answer = upstream.getresponse()
        body = answer.read()
        if answer.status == 200 and self.server.loses_next():
            with open(os.environ.get(VARIABLE, os.devnull), "a") as file:
                file.write(f"{os.environ['VIME_SESSION']} {self.server.count}\n")
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: what is written here would be the program's last output."""


def own_index() -> int:
    """Return the number of this sample, which the server of sessions tells to who has the session's key."""
    parts = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    connection.request("GET", f"{parts.path}/sessions/{os.environ['VIME_SESSION']}", headers=key)
    return int(json.loads(connection.getresponse().read())["index"])


def program_of(index: int) -> str:
    """Return the program of the sample of this number."""
    return PROGRAMS[index % len(PROGRAMS)]


def command_of(program: str, packages: Path) -> list[str]:
    """Node looks for packages above the file itself, so a program for it is linked beside them."""
    if program.endswith(".mjs"):
        place = packages / program
        if not place.exists():
            own = place.with_name(f"{program}.{os.getpid()}")
            own.write_bytes((HERE / "programs" / program).read_bytes())
            own.replace(place)
        return ["/usr/bin/env", "node", str(place)]
    return [str(packages / "py" / "bin" / "python"), "-I", str(HERE / "programs" / program)]


def main() -> int:
    packages = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGES
    index = own_index()
    prompt = f"{os.environ['VIME_PROMPT']} #{index}"  # of its own for each sample: an engine that is a function of the
    proxy = Proxy(os.environ["OPENAI_BASE_URL"], prompt)  # prompt would say the same to all samples of a group
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{proxy.server_address[1]}"
    environment = {
        **os.environ, "VIME_PROMPT": prompt, "OPENAI_BASE_URL": f"{root}/v1", "ANTHROPIC_BASE_URL": root,
        "LANGSMITH_TRACING": "false",
    }  # fmt: skip
    environment.pop("PYTHONPATH", None)
    guard = [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid())]
    return subprocess.run([*guard, *command_of(program_of(index), packages)], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
