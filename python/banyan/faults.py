# SPDX-License-Identifier: Apache-2.0
"""What SGLang calls of Banyan's cannot raise: SGLang goes on as if nothing had been called.

Invariants
  1. What Banyan's code raises is said (at the first, tenth, hundredth ... time of each place), counted, and not passed
     on. What SGLang's own code raises within a hook is passed on as it is.
  2. Where to go on without what was to be done could give wrong tokens, the process stops to share first (``stops``).
  3. Deliberate ends are no failures: ``SystemExit`` and the classes of ``let_pass``.

A failure costs one request, or one process, its sharing, and never a token. One frame more a call, which is less than
a microsecond.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

logger = logging.getLogger("banyan")
T = TypeVar("T")

_DELIBERATE: list[type[BaseException]] = [
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
]
_counts: Counter[str] = Counter()
_lock = threading.Lock()
_tell: Callable[[], None] | None = None
_stop: Callable[[], None] | None = None


def let_pass(*kinds: type[BaseException]) -> None:
    """These are meant: they go on to SGLang."""
    _DELIBERATE.extend(kinds)


def counts() -> dict[str, int]:
    """How often each place of this process has failed."""
    return dict(_counts)


def count_at(tell: Callable[[], None]) -> None:
    """Call ``tell`` at every failure from now on, and once for each so far."""
    global _tell
    _tell = tell
    for _ in range(_counts.total()):
        tell()


def stop_with(stop: Callable[[], None]) -> None:
    """``stop`` ends sharing in this process: it lends and fetches nothing new, and what is under way lands."""
    global _stop
    _stop = stop


def note(
    where: str, error: BaseException, *, stops: bool = False, consequence: str = "SGLang goes on without it"
) -> None:
    """Something of Banyan's failed at ``where``. Raises ``error`` again when it is meant to end something."""
    if isinstance(error, tuple(_DELIBERATE)):
        raise error
    with _lock:
        _counts[where] += 1
        number = _counts[where]
    if _tell is not None:
        _tell()
    if _is_power_of_ten(number):
        consequence = "this process shares nothing new from now on" if stops else consequence
        logger.error(
            "banyan: %s failed (%d so far): %s; please report this", where, number, consequence, exc_info=error
        )
    if stops:
        stop_sharing()


def stop_sharing() -> None:
    """Lend and fetch nothing from now on; called once."""
    global _stop
    stop, _stop = _stop, None
    if stop is not None:
        # Whoever stops has met a fault, and may meet it again.
        quiet(stop, "stop", lambda: None)()


def quiet(
    function: Callable[..., T], where: str, otherwise: Callable[..., T], *, stops: bool = False
) -> Callable[..., T]:
    """``function``, and where it fails what ``otherwise`` makes of the same arguments."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - a panic of native code is no Exception; note() raises what is meant
            note(where, error, stops=stops)
            return otherwise(*args, **kwargs)

    return guarded


def hush(owner: object, *names: str) -> None:
    """These methods of ``owner`` only tell, or look after something: whoever calls them goes on where they fail."""
    for name in names:
        where = f"{type(owner).__name__}.{name}"
        setattr(owner, name, quiet(getattr(owner, name), where, lambda *args, **kwargs: None))


def beside(hook: Callable[..., Any], where: str, *, stops: bool = False) -> Callable[..., Any]:
    """A hook before or after SGLang's function: where it fails, it has changed nothing."""
    return quiet(hook, where, lambda *args, **kwargs: None, stops=stops)


def around(hook: Callable[..., Any], where: str, *, stops: bool = False) -> Callable[..., Any]:
    """A hook around SGLang's function: where it fails, SGLang's function has been called once all the same."""
    if inspect.isasyncgenfunction(hook):
        return _around_stream(hook, where)
    if inspect.iscoroutinefunction(hook):
        return _around_coroutine(hook, where)

    @functools.wraps(hook)
    def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = _Call(original)
        try:
            return hook(call, *args, **kwargs)
        except BaseException as error:
            if error is call.error:
                raise
            note(where, error, stops=stops)
        return call.result if call.has_returned else original(*args, **kwargs)

    return guarded


class _Call:
    """SGLang's function within a hook, and what became of it."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self.has_returned = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.result = self._original(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.has_returned = True
        return self.result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _around_coroutine(hook: Callable[..., Any], where: str) -> Callable[..., Any]:
    @functools.wraps(hook)
    async def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        errors: list[BaseException] = []
        results: list[Any] = []

        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                results.append(await original(*args, **kwargs))
            except BaseException as error:
                errors.append(error)
                raise
            return results[-1]

        try:
            return await hook(call, *args, **kwargs)
        except BaseException as error:
            if error in errors:
                raise
            note(where, error)
        return results[-1] if results else await original(*args, **kwargs)

    return guarded


def _around_stream(hook: Callable[..., Any], where: str) -> Callable[..., Any]:
    @functools.wraps(hook)
    async def guarded(original: Callable[..., AsyncIterator[Any]], *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        errors: list[BaseException] = []
        has_called = False

        async def call(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            nonlocal has_called
            has_called = True
            try:
                async for item in original(*args, **kwargs):
                    yield item
            except BaseException as error:
                errors.append(error)
                raise

        try:
            async for item in hook(call, *args, **kwargs):
                yield item
            return
        except BaseException as error:
            if error in errors:
                raise
            note(where, error)
            # A request is sent once: what fails after that is its end.
            if has_called:
                raise
        async for item in original(*args, **kwargs):
            yield item

    return guarded


def _is_power_of_ten(number: int) -> bool:
    while number % 10 == 0:
        number //= 10
    return number == 1
