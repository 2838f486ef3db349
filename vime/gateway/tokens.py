"""Bearer tokens of a run: who may call the gateway, for what, and until when.

The file holds hashes only. It is read again when it changed, so a token is revoked while the run works. A token has
256 random bits, so one round of SHA-256 is enough: there is nothing to guess. A token's name is the producer's name.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Collection
from enum import StrEnum
from pathlib import Path

import msgspec

from vime.gateway.refusal import Refusal
from vime.types import ConfigError
from vime.utils.files import NoLocksError, lock_file, sync

TOKENS_NAME = "gateway_tokens.json"  # in a run directory
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_TOKEN = re.compile(r"vime_([0-9a-f]{16})_([0-9a-f]{64})")


class Scope(StrEnum):
    """What a token may do."""

    TRAIN = "train"  # lease prompts, put groups, confirm weights
    EVAL = "eval"  # the same for evaluations
    READ = "read"  # see the queue and all producers
    ADMIN = "admin"  # the same, end what any producer has, and revoke tokens


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a token. `expires` in seconds since 1970."""

    id: str
    name: str
    hash: str
    scopes: tuple[Scope, ...]
    expires: float


class _Contents(msgspec.Struct, frozen=True, kw_only=True):
    lease_key: str  # signs leases (service.py)
    tokens: tuple[Token, ...] = ()


class TokenFile:
    """The tokens of one run. Any process may change the file; the gateway reads it."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = run_dir / TOKENS_NAME, clock
        self._seen: tuple[int, int, int] | None = None
        self._contents = _Contents(lease_key="")
        if not self._path.is_file():
            self._change(lambda contents: contents)

    @property
    def lease_key(self) -> bytes:
        return bytes.fromhex(self._read().lease_key)

    def make(self, name: str, scopes: tuple[Scope, ...], *, seconds: float) -> str:
        """Make a token and return it: the only time that it can be read."""
        if not _NAME.fullmatch(name) or not scopes or not seconds > 0:
            raise ConfigError(
                f"token {name!r} with scopes {[*scopes]} for {seconds:g} s: expected a name of letters, digits, - and "
                "_, at least one scope, and a time above 0."
            )
        token_id, secret = secrets.token_hex(8), secrets.token_hex(32)
        made = Token(id=token_id, name=name, hash=_hash(secret), scopes=scopes, expires=self._clock() + seconds)
        self._change(lambda contents: msgspec.structs.replace(contents, tokens=(*contents.tokens, made)))
        return f"vime_{token_id}_{secret}"

    def revoke(self, token_id: str) -> None:
        """Refuse this token from the next call on."""
        if token_id not in [token.id for token in self.tokens()]:
            raise ConfigError(
                f"{self._path}: no token has id {token_id!r}; expected one of {[token.id for token in self.tokens()]}."
            )
        self._change(
            lambda contents: msgspec.structs.replace(
                contents, tokens=tuple(token for token in contents.tokens if token.id != token_id)
            )
        )

    def revoke_all(self, name: str) -> list[str]:
        """Refuse every token of a producer from the next call on. Return their ids: none when there are none."""
        found = [token.id for token in self.tokens() if token.name == name]
        if found:
            self._change(
                lambda contents: msgspec.structs.replace(
                    contents, tokens=tuple(token for token in contents.tokens if token.name != name)
                )
            )
        return found

    def tokens(self) -> tuple[Token, ...]:
        return self._read().tokens

    def check(self, header: str | None, scopes: Collection[Scope]) -> str:
        """Return the name of the token in an Authorization header. Refusal 401 without a valid one, 403 when it has
        none of these scopes."""
        word, _, given = (header or "").partition(" ")
        match = _TOKEN.fullmatch(given.strip()) if word.lower() == "bearer" else None
        token_id, secret = match.groups() if match else ("", "")
        token = next((token for token in self.tokens() if token.id == token_id), None)
        is_right = hmac.compare_digest(_hash(secret), token.hash if token is not None else _hash("none"))
        if token is None or not is_right or token.expires <= self._clock():
            raise Refusal(
                401,
                "unauthorized",
                "the call has no valid token.",
                got="no token, or one that is unknown, revoked or expired",
                expected="Authorization: Bearer TOKEN",
                next_action="Ask who started the run for a token.",
            )
        if set(scopes).isdisjoint(token.scopes):
            raise Refusal(
                403,
                "forbidden",
                "the token may not do this.",
                got=f"a token with scopes {', '.join(token.scopes)}",
                expected=f"scope {' or '.join(scopes)}",
                next_action="Use a token that has this scope.",
            )
        return token.name

    def _read(self) -> _Contents:
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_ino, status.st_size)
            if seen != self._seen:
                self._contents, self._seen = msgspec.json.decode(self._path.read_bytes(), type=_Contents), seen
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{self._path}: the tokens of the run cannot be read: {error}. Nobody is let in. Restore the file, or "
                "remove it and make new tokens."
            ) from error
        return self._contents

    def _change(self, change: Callable[[_Contents], _Contents]) -> None:
        """Replace the file, one process after the other; a reader sees the old or the new one."""
        draft = self._path.with_suffix(".tmp")
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            lock_file(lock, fcntl.LOCK_EX, self._path)
            contents = self._read() if self._path.is_file() else _Contents(lease_key=secrets.token_hex(32))
            draft.unlink(missing_ok=True)
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "wb") as written:
                written.write(msgspec.json.encode(change(contents)))
            sync(draft)
            draft.replace(self._path)
            sync(self._path.parent)
        except NoLocksError as error:
            raise ConfigError(str(error)) from error
        finally:
            os.close(lock)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
