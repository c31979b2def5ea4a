"""A plugin for pytest: a test that hangs ends at its timeout, whatever it does about it.

Adds three things to pytest-timeout, which interrupts a test once, by an exception:

- Hypothesis takes that exception for a failed example. It would run the example again, which hangs
  again. So a property test is interrupted by an exception that Hypothesis lets through.
- No timeout is left for the teardown once a test has failed. So the teardown has its own.
- No timeout is left for what waits while the exception is on its way, such as the end of a `with`.
  So a test is interrupted again for each further timeout.

Owns these. Must not know what is tested.
"""

import signal
from collections.abc import Generator
from types import FrameType
from typing import Any

import pytest
from _pytest.outcomes import OutcomeException

_SETTINGS = pytest.StashKey[Any]()


class TimedOut(OutcomeException):
    """The timeout of a test is over. Unlike pytest's own `Failed`, Hypothesis does not catch it."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
    """Have a timer of the method "signal" go off more than once, and raise `TimedOut`."""
    done = yield
    item.stash[_SETTINGS] = settings
    interrupt = signal.getsignal(signal.SIGALRM)
    if settings.method != "signal" or not callable(interrupt):
        return done

    def handler(signum: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        try:
            interrupt(signum, frame)
        except pytest.fail.Exception as error:
            raise TimedOut(str(error)) from None

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, settings.timeout)
    return done


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Begin a new timeout."""
    if (settings := item.stash.get(_SETTINGS, None)) is not None and not settings.func_only:
        item.config.hook.pytest_timeout_cancel_timer(item=item)
        item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)
    return (yield)
