"""The gateway as a rollout job of ours sees it: each call is repeated until its response arrives, or it is refused.

A call that got no response may have been carried out. The protocol counts a call and its repetition once, so the same
bytes are sent again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from vime.gateway import messages as m
from vime.types import ConfigError, LostError, VimeError
from vime.utils.http import HttpFailure, HttpSession, HttpUntrusted, Response
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)
Kind = TypeVar("Kind", bound=m.Message)
Result = TypeVar("Result")

CALL_S = 60.0
PATIENCE_S = 600.0
"""How long a gateway may be away: the run may start again from a checkpoint meanwhile."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
PART_BYTES = 32 << 20
MSGPACK = "application/msgpack"
UNCONFIRMED = "unconfirmed_version"
"""May be repeated, but only after this job has reported its weights: alone it would be refused until patience ends."""


class GatewayAwayError(LostError):
    """The gateway has not responded for longer than the job waits for it."""


class RefusedError(VimeError):
    """A call that would be refused again, unless the job acts first. `code`: as in docs/producer-protocol.md."""

    def __init__(self, path: str, body: m.ErrorBody) -> None:
        super().__init__(f"{path}: {body.what} Got {body.got}; expected {body.expected}. {body.next}")
        self.code = body.code


class OtherBytesError(VimeError):
    """A file that has arrived is not the one that its manifest names."""


class GatewayClient:
    """Used on one event loop. `url`: http(s)://HOST:PORT; `token`: of this job."""

    def __init__(self, url: str, token: str, *, patience_s: float = PATIENCE_S) -> None:
        self.url, self._patience_s = url.rstrip("/"), patience_s
        self._headers = {"authorization": f"Bearer {token}", "Content-Type": MSGPACK, "accept": MSGPACK}
        self._session: HttpSession | None = None  # made on the loop

    async def call(
        self, path: str, message: m.Message, kind: type[Kind], *, longer_s: float = 0.0, patience_s: float | None = None
    ) -> Kind:
        """POST a message. `longer_s`: how much longer than usual the gateway may take; `patience_s`: how long it may be
        away, if not as usual."""
        body = msgspec.msgpack.encode(message)
        return await self._repeated("POST", path, body, _reader(path, kind), longer_s=longer_s, patience_s=patience_s)

    async def get(self, path: str, kind: type[Kind]) -> Kind:
        return await self._repeated("GET", path, None, _reader(path, kind))

    async def download(self, version: int, file: m.WeightFile, directory: Path) -> None:
        """Write one file of a version, part by part. OtherBytesError when it is not the file of the manifest; then, and
        when it is refused, another manifest may be there: the run was started again, and published other files under
        the same number."""
        if Path(file.name).name != file.name:
            raise VimeError(f"{self.url}: version {version} has a file {file.name!r}; expected a name without a path.")
        path, digest = f"/v1/weights/{version}/files/{file.name}", hashlib.sha256()
        draft = directory / f"{file.name}.partial"
        with draft.open("wb") as written:
            for start in range(0, file.num_bytes, PART_BYTES):
                end = min(start + PART_BYTES, file.num_bytes) - 1
                content = await self._repeated("GET", path, None, _part, headers={"Range": f"bytes={start}-{end}"})
                digest.update(content)
                written.write(content)
        if digest.hexdigest() != file.sha256:
            draft.unlink()
            raise OtherBytesError(
                f"{self.url}{path}: its SHA-256 is {digest.hexdigest()}, expected {file.sha256}. Read the manifest "
                "again."
            )
        os.replace(draft, directory / file.name)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _repeated(
        self,
        method: str,
        path: str,
        body: bytes | None,
        read: Callable[[Response], Result | None],
        *,
        headers: dict[str, str] | None = None,
        longer_s: float = 0.0,
        patience_s: float | None = None,
    ) -> Result:
        """Return what `read` makes of the response; None: it is not the gateway's, and counts as a lost one.

        Waits for: a response that is no refusal to repeat. Unblocked by: the gateway. `patience_s` is for a gateway
        that nobody hears of: one that refuses is there, and knows how long a queue may be full."""
        if self._session is None:
            self._session = HttpSession(is_outside=True)
        patience_s = self._patience_s if patience_s is None else patience_s
        ends, pause_s, wanted_s = time.monotonic() + patience_s, FIRST_PAUSE_S, 0.0
        with waiting(f"the gateway's response to {path}", "gateway", deadline_s=patience_s) as wait:
            while True:
                try:
                    response = await self._session.call(
                        method,
                        self.url + path,
                        body,
                        headers={**self._headers, **(headers or {})},
                        deadline_s=CALL_S + longer_s,
                    )
                except HttpUntrusted as error:
                    raise ConfigError(
                        f"{self.url}: its certificate is not trusted: {error}. Name its authority by the variable "
                        "SSL_CERT_FILE, or correct the address."
                    ) from error
                except HttpFailure as error:
                    problem, wanted_s = str(error), 0.0
                else:
                    wanted_s = min(response.retry_after_s, CALL_S)
                    is_done = response.status in (200, 206)
                    if is_done and (result := read(response)) is not None:
                        return result
                    refusal = None if is_done else _refusal(path, response)
                    if refusal is not None and (not refusal.may_repeat or refusal.code == UNCONFIRMED):
                        raise RefusedError(path, refusal)
                    problem = response.described() if refusal is None else f"{refusal.code}: {refusal.what}"
                    if refusal is not None:
                        wait.since = time.monotonic()
                        ends = wait.since + patience_s
                if time.monotonic() > ends:
                    raise GatewayAwayError(
                        f"{self.url}{path}: not done within {patience_s:g} s; the last try: {problem}. Does the "
                        "trainer run? Start the job again when it does."
                    )
                logger.info("%s is repeated in %.1f s: %s", path, max(pause_s, wanted_s), problem)
                await asyncio.sleep(max(pause_s, wanted_s))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _refusal(path: str, response: Response) -> m.ErrorBody | None:
    """Return what the gateway says; None for a failure of what stands between, which may pass."""
    try:
        return msgspec.msgpack.decode(response.content, type=m.ErrorBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if response.status >= 500:
            return None
        raise VimeError(
            f"{path}: {response.described()}: not of a gateway of Vime. Check the address and what stands between."
        ) from error


def _part(response: Response) -> bytes | None:
    """Return the part of a file that `Range` named; None for what is no part, as a proxy's page with status 200."""
    return response.content if response.status == 206 else None


def _reader(path: str, kind: type[Kind]) -> Callable[[Response], Kind | None]:
    """Return a function that decodes a response; None for bytes that are no message at all, as of a proxy's page."""

    def read(response: Response) -> Kind | None:
        try:
            return msgspec.msgpack.decode(response.content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if not _is_message(response.content):
                return None
            raise VimeError(
                f"{path}: the response is no {kind.__name__}: {error}. Does the gateway speak another version?"
            ) from error

    return read


def _is_message(content: bytes) -> bool:
    try:
        return isinstance(msgspec.msgpack.decode(content), dict)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError):  # TypeError: a map as a map's key
        return False
