"""A sample that is offered to agents elsewhere, at the moment of its deadline."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from vime.sessions.offers import Offer, Offers


class ClaimedTooLate(asyncio.Event):
    """The claim and the end of the wait come in the same step of the loop."""

    async def wait(self) -> NoReturn:
        self.set()
        raise TimeoutError


def test_a_sample_that_is_claimed_in_the_moment_of_its_deadline_is_its_agent_s() -> None:
    """Else it would be issued again while an agent plays it."""
    live: Any = object()
    offer = Offer(live, {}, 0, claimed=ClaimedTooLate())
    assert asyncio.run(Offers().offer(offer, deadline_s=30)) is True


def test_a_sample_that_nobody_has_claimed_is_offered_no_longer() -> None:
    live: Any = object()

    async def offered_and_claimed() -> tuple[bool, Offer | None]:
        offers = Offers()
        is_claimed = await offers.offer(Offer(live, {}, 0), deadline_s=0)
        return is_claimed, await offers.claim("", lambda: True)

    assert asyncio.run(offered_and_claimed()) == (False, None)
