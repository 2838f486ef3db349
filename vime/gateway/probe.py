"""Single calls of a gateway, never repeated: for `vime producers` and `vime conformance`, which look at one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from vime.gateway.messages import ErrorBody, Message
from vime.types import ClusterError, ConfigError
from vime.utils.http import HttpFailure, HttpThread, Response

Kind = TypeVar("Kind", bound=Message)
CALL_S = 30.0


class GatewayProbe:
    """The calls of one token; any thread. `url` as the run writes it, for example http://127.0.0.1:8790."""

    def __init__(self, url: str, token: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address of a gateway. Expected http://HOST:PORT or https://HOST:PORT.")
        self.url, self._thread = url.rstrip("/"), HttpThread("vime-gateway-client")
        self._headers = {"Authorization": f"Bearer {token}"}

    def call(
        self, method: str, path: str, body: bytes | None = None, *, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return the response of any status. ClusterError when there is none."""
        try:
            return self._thread.call(
                method, self.url + path, body, headers={**self._headers, **(headers or {})}, deadline_s=CALL_S
            )
        except HttpFailure as error:
            raise ClusterError(
                f"{self.url}: the gateway does not respond: {error}. Expected the address that the run wrote into "
                "gateway.json. Does the run live, and is the address reachable from here?"
            ) from error

    def get(self, path: str, kind: type[Kind]) -> Kind:
        """Return the message of a call that only looks. ConfigError when the gateway refuses it."""
        response = self.call("GET", path)
        try:
            if response.status == 200:
                return msgspec.json.decode(response.content, type=kind)
            refused = msgspec.json.decode(response.content, type=ErrorBody)
        except msgspec.MsgspecError as error:
            raise ClusterError(
                f"{self.url}{path}: this is no gateway of Vime ({response.described()[:200]}). Correct the address."
            ) from error
        raise ConfigError(
            f"{self.url}{path}: {refused.what} Got {refused.got}; expected {refused.expected}. {refused.next} "
            "Tokens: --token or VIME_TOKEN, made by `vime token make RUN NAME --scopes read`."
        )

    def close(self) -> None:
        self._thread.close()
