"""The samples of a run that agents elsewhere ask for (`POST /v1/sessions`): each is given to one of them.

Evaluation is given first, then the group that training needs first. Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vime.sessions.service import Live
from vime.sessions.store import State
from vime.utils.waits import AGENT, waiting

CLAIM_S = 30.0
"""How long one request for a sample is held when there is none; then its agent is told so, and asks again."""


@dataclass(slots=True, eq=False)
class Offer:
    """A session that an agent may claim. `told`: what its agent gets, beside the addresses. `priority`: the lowest is
    given first."""

    live: Live
    told: Mapping[str, object]
    priority: int
    claimed: asyncio.Event = field(default_factory=asyncio.Event)


class Offers:
    """Consumes `offer` of the run and `claim` of agents; each waits for the other."""

    def __init__(self) -> None:
        self._open: list[Offer] = []  # those that nobody has claimed
        self._claims: dict[str, Offer] = {}  # by Idempotency-Key, as long as the session is known
        self._expected: set[str] = set()  # keys that got a session of an earlier process, which is not here again yet
        self._news = asyncio.Condition()

    async def offer(self, offer: Offer, *, deadline_s: float) -> bool:
        """Return whether an agent has claimed it within `deadline_s`. It is offered no longer when this returns."""
        self._open.append(offer)
        await self.look_again()
        try:
            with waiting("a sample to be claimed by an agent outside", AGENT, deadline_s=deadline_s):
                async with asyncio.timeout(deadline_s):
                    await offer.claimed.wait()
        except TimeoutError:
            return offer.claimed.is_set()
        finally:
            if offer in self._open:
                self._open.remove(offer)
        return True

    async def claim(self, key: str, is_gone: Callable[[], bool]) -> Offer | None:
        """Return the next offer, or the one that an earlier request of the same `key` got; None when there is none
        within CLAIM_S. A caller that `is_gone` gets none: it could not play what it never hears of.

        Waits for: the run, which offers a sample. `look_again` is called when a caller goes away.
        """
        try:
            with waiting("a sample for an agent outside", "driver", deadline_s=CLAIM_S):
                async with asyncio.timeout(CLAIM_S), self._news:
                    await self._news.wait_for(lambda: self._has_answer(key) or is_gone())
        except TimeoutError:
            return None
        if key in self._claims:
            return self._claims[key]
        if is_gone() or not self._has_answer(key):
            return None
        offer = min(self._open, key=lambda one: one.priority)  # of equal ones the first
        self._open.remove(offer)
        if key:
            self._claims[key] = offer
        offer.claimed.set()
        return offer

    def _has_answer(self, key: str) -> bool:
        return key in self._claims or (bool(self._open) and key not in self._expected)

    def expect(self, live: Live, *, patience_s: float) -> None:
        """Give the key that claimed this session of an earlier process no other one for `patience_s`, within which
        `renew` is expected. An agent that has asked for a turn has had the answer to its claim."""
        key = live.session.claim
        if key and live.session.state is State.OPEN and not live.entries:
            self._expected.add(key)
            asyncio.get_running_loop().call_later(patience_s, self._expected.discard, key)

    async def renew(self, offer: Offer) -> None:
        """Answer its key with a session that was claimed from an earlier process."""
        if offer.live.session.claim:
            self._expected.discard(offer.live.session.claim)
            self._claims.setdefault(offer.live.session.claim, offer)
        offer.claimed.set()
        await self.look_again()

    async def look_again(self) -> None:
        """Let every claim look whether it can be answered."""
        async with self._news:
            self._news.notify_all()

    def forget(self, live: Live) -> None:
        """Forget who claimed a session that is deleted."""
        self._claims = {key: offer for key, offer in self._claims.items() if offer.live is not live}
