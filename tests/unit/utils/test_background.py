"""A call in a thread of its own."""

import gc
import time
import weakref

import pytest

from vime.utils.background import in_background


class Held:
    """Something that a call needs, as a broadcast its process group."""

    def fail(self) -> None:
        raise ValueError("it has failed")


def test_its_result_or_its_error_is_that_of_the_future() -> None:
    assert in_background("call", lambda: 3).result(10) == 3
    with pytest.raises(ValueError, match="it has failed"):
        in_background("call", Held().fail).result(10)


def test_what_a_call_that_failed_held_is_free_without_the_collector() -> None:
    """Which is off while a round runs. A future, its error and the frame that the error was raised through were a
    circle: the process group of a broken broadcast lived on in it, with a thread that took a core."""
    held = Held()
    is_there = weakref.ref(held)
    gc.collect()
    gc.disable()
    try:
        failed = in_background("call", held.fail)
        assert isinstance(failed.exception(10), ValueError)
        del held, failed
        ends = time.monotonic() + 10
        while is_there() is not None and time.monotonic() < ends:  # the thread may be about to end
            time.sleep(0.01)
        assert is_there() is None
    finally:
        gc.enable()
