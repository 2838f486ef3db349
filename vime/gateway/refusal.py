"""A call that the gateway does not carry out, as an exception with everything that the caller is told."""

from __future__ import annotations

from vime.gateway.messages import Code, ErrorBody


class Refusal(Exception):
    """`retry_after_s`: the same call may be repeated after so many seconds; None: it would be refused again."""

    def __init__(
        self,
        status: int,
        code: Code,
        what: str,
        *,
        got: str,
        expected: str,
        next_action: str,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(f"{what} got {got}; expected {expected}. {next_action}")
        self.status, self.code, self.retry_after_s = status, code, retry_after_s
        self.body = ErrorBody(
            code=code, what=what, got=got, expected=expected, next=next_action, may_repeat=retry_after_s is not None
        )
