# SPDX-License-Identifier: Apache-2.0
"""What Banyan raises stays in Banyan; what SGLang raises, and what is meant, passes."""

import asyncio
import logging

import pytest

from banyan import faults


class Meant(Exception):
    pass


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(faults, "_counts", type(faults._counts)())
    monkeypatch.setattr(faults, "_tell", None)
    monkeypatch.setattr(faults, "_stop", None)
    monkeypatch.setattr(faults, "_DELIBERATE", [*faults._DELIBERATE])


def fails(*args, **kwargs):
    raise ValueError("ours")


def theirs_fails(*args, **kwargs):
    raise KeyError("theirs")


def test_beside_when_the_hook_raises_then_it_has_changed_nothing_and_is_said_once(caplog):
    hook = faults.beside(fails, "30-request-created")
    with caplog.at_level(logging.ERROR):
        assert [hook(number) for number in range(9)] == [None] * 9
    assert faults.counts() == {"30-request-created": 9}
    assert caplog.text.count("30-request-created failed (1 so far)") == 1 == len(caplog.records)


def test_around_when_the_hook_raises_before_the_call_then_sglangs_function_is_called():
    assert faults.around(fails, "hook")(lambda number: number + 1, 1) == 2


def test_around_when_the_hook_raises_behind_the_call_then_it_is_not_called_again():
    calls = []

    def hook(original, number):
        original(number)
        raise ValueError("ours")

    assert faults.around(hook, "hook")(lambda number: calls.append(number) or "result", 7) == "result"
    assert calls == [7] and faults.counts() == {"hook": 1}


@pytest.mark.parametrize("hook", [lambda original: original(), lambda original: original() and fails()])
def test_around_when_sglangs_function_raises_then_that_passes_and_is_no_failure(hook):
    with pytest.raises(KeyError):
        faults.around(hook, "hook")(theirs_fails)
    assert faults.counts() == {}


@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), Meant()])
def test_quiet_when_the_end_is_meant_then_it_passes(error):
    faults.let_pass(Meant)

    def ends():
        raise error

    with pytest.raises(type(error)):
        faults.quiet(ends, "hook", lambda: None)()
    assert faults.counts() == {}


def test_quiet_when_native_code_panics_then_it_stays_here():
    class PanicException(BaseException):
        """As PyO3's: no ``Exception``."""

    def panics():
        raise PanicException("index out of bounds")

    assert faults.quiet(panics, "hook", lambda: "otherwise")() == "otherwise"


def test_stop_when_a_hook_that_guards_pages_fails_then_sharing_ends_once():
    stopped = []
    faults.stop_with(lambda: stopped.append(1))
    for _ in range(3):
        faults.beside(fails, "33-weights-updated", stops=True)()
    assert stopped == [1]


def test_stop_when_it_fails_too_then_that_stays_here():
    faults.stop_with(fails)
    assert faults.quiet(fails, "guard", lambda: 7, stops=True)() == 7
    assert faults.counts() == {"guard": 1, "stop": 1}


def test_count_when_somebody_listens_then_he_is_told_of_what_was_before_too():
    faults.beside(fails, "a")()
    told = []
    faults.count_at(lambda: told.append(1))
    faults.beside(fails, "b")()
    assert len(told) == 2


def collect(stream):
    async def all_of_it():
        return [item async for item in stream]

    return asyncio.run(all_of_it())


async def answers(number):
    for item in range(number):
        yield item


async def broken_answers(number):
    yield 0
    raise KeyError("theirs")


def test_stream_when_the_hook_raises_before_it_asks_then_sglang_answers():
    async def hook(original, number):
        fails()
        yield

    assert collect(faults.around(hook, "hook")(answers, 3)) == [0, 1, 2]
    assert faults.counts() == {"hook": 1}


def test_stream_when_the_hook_raises_behind_the_question_then_the_request_is_not_sent_twice():
    async def hook(original, number):
        async for item in original(number):
            yield item
        fails()

    with pytest.raises(ValueError, match="ours"):
        collect(faults.around(hook, "hook")(answers, 3))
    assert faults.counts() == {"hook": 1}


def test_stream_when_sglang_raises_then_that_passes_and_is_no_failure():
    async def hook(original, number):
        async for item in original(number):
            yield item

    with pytest.raises(KeyError):
        collect(faults.around(hook, "hook")(broken_answers, 3))
    assert faults.counts() == {}


def test_coroutine_when_the_hook_raises_then_sglang_answers():
    async def hook(original, number):
        fails()

    async def original(number):
        return number + 1

    assert asyncio.run(faults.around(hook, "hook")(original, 1)) == 2


def test_coroutine_when_the_hook_raises_behind_the_call_then_it_is_not_called_again():
    asked = []

    async def hook(original, number):
        await original(number)
        fails()

    async def original(number):
        asked.append(number)
        return number + 1

    assert asyncio.run(faults.around(hook, "hook")(original, 1)) == 2
    assert asked == [1]
