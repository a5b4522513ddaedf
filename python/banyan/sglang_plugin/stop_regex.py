# SPDX-License-Identifier: Apache-2.0
"""Which patterns Python's matcher may try in too many ways: ``(a+)+b`` keeps it busy for years over fifty letters,
``.*.*.*.*.*.*.*.*x`` over a hundred, and with it the rank whose scheduler looks for it.

Refused are
  1. a repeat of varying length within one of more than ``MANY`` times, and alternatives within one that do not begin
     with different letters. Some of these are harmless: ``(a+,)+``.
  2. repeats one behind the other, and alternatives, that can share the same letters out in more than ``MOST_WAYS``
     ways. Between two repeats a letter that has to come, and that one of them cannot take, says where each ends:
     ``[0-9]+,[0-9]+`` has one way. So the matcher looks at each letter from each place where a match may begin, some
     times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from re import _compiler as compiler  # type: ignore[attr-defined]
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT)
MANY = 8

ENDLESS = 10_000
"""Stands for a repeat without a bound: an answer has as many letters."""

MOST_WAYS = 4 * ENDLESS
MOST_PATHS, MOST_STEPS, MOST_VARYING, MOST_LOOKS = 16, 256, 32, 4096
"""What is larger is refused: to look at it takes time as well. ``MOST_LOOKS``: at parts of one pattern, in all."""

MOST_REMEMBERED = 1024
"""Patterns. Each prompt of a batch has those of its request, and is looked at by itself."""

_OF_CHOICES = frozenset("*+?{|")
"""A pattern without any of these has no repeat and no alternatives."""

_SAMPLE = "".join(map(chr, range(256))) + "ſКы٣一\u2003\u2028\u0301😀"


@dataclass(frozen=True, slots=True)
class _Step:
    """A part of a pattern. ``letters``: a bit for each of the alphabet that it can take. ``ways``: how many numbers of
    them. ``is_certain``: whether it takes one at least."""

    letters: int
    ways: int = 1
    is_certain: bool = False


_Path = tuple[_Step, ...]


class _TooLarge(Exception):
    """To look at."""


@lru_cache(MOST_REMEMBERED)
def may_not_end(pattern: str) -> bool:
    """Raises re.error, or RecursionError, for what is no pattern."""
    items = parser.parse(pattern)
    if _OF_CHOICES.isdisjoint(pattern):
        return False
    if _may_not_end(items, is_repeated=False):
        return True
    try:
        return any(_has_too_many_ways(path) for path in _Paths(items).of(items))
    except _TooLarge:
        return True


def _may_not_end(items: Iterable[tuple[Any, Any]], *, is_repeated: bool) -> bool:
    for op, value in items:
        if op in REPEATS:
            least, most, body = value
            if (is_repeated and most > least) or _may_not_end(body, is_repeated=is_repeated or most > MANY):
                return True
            continue
        if op is ops.BRANCH and is_repeated and not _begin_apart(value[1]):
            return True
        if any(_may_not_end(body, is_repeated=is_repeated) for body in _within(op, value)):
            return True
    return False


def _within(op: Any, value: Any) -> Sequence[Sequence[tuple[Any, Any]]]:
    """The patterns of which one consists that is no repeat."""
    if op is ops.BRANCH:
        return list(value[1])
    if op is ops.GROUPREF_EXISTS:
        return [body for body in value[1:] if body is not None]
    if op in (ops.SUBPATTERN, ops.ASSERT, ops.ASSERT_NOT):
        return [value[-1]]
    if op is ops.ATOMIC_GROUP:
        return [value]
    return [value[-1]] if op is ops.POSSESSIVE_REPEAT else []


def _begin_apart(branches: Sequence[Sequence[tuple[Any, Any]]]) -> bool:
    first = [branch[0][1] if len(branch) and branch[0][0] is ops.LITERAL else None for branch in branches]
    return None not in first and len(set(first)) == len(first)


class _Paths:
    """The steps of one pattern, one path for each choice of alternatives in which repeats are."""

    def __init__(self, pattern: Any) -> None:
        self._state = pattern.state
        self._alphabet = "".join(sorted({*_SAMPLE, *_named(pattern)}))
        self._any = (1 << len(self._alphabet)) - 1
        self._taken: dict[Any, int] = {}
        self._num_looks = 0

    def of(self, items: Iterable[tuple[Any, Any]]) -> list[_Path]:
        paths: list[_Path] = [()]
        for op, value in items:
            ends = self._of_one(op, value)
            self._num_looks += len(paths) * len(ends)
            if len(paths) * len(ends) > MOST_PATHS or self._num_looks > MOST_LOOKS:
                raise _TooLarge
            paths = [path + end for path in paths for end in ends]
            if any(len(path) > MOST_STEPS for path in paths):
                raise _TooLarge
        return paths

    def _of_one(self, op: Any, value: Any) -> list[_Path]:
        if op in (ops.LITERAL, ops.NOT_LITERAL, ops.IN, ops.ANY):
            return [(_Step(self._taken_by(op, value), is_certain=True),)]
        if op in (*REPEATS, ops.POSSESSIVE_REPEAT):
            return self._of_repeat(*value)
        if op is ops.GROUPREF:
            return [(_Step(self._any),)]
        if op is ops.SUBPATTERN and (value[1] or value[2]):
            # Other flags hold in here than those that letters are looked up with.
            return [tuple(replace(step, letters=self._any) for step in path) for path in self.of(value[-1])]
        paths = [path for body in _within(op, value) for path in self.of(body)]
        if op in (ops.ASSERT, ops.ASSERT_NOT):
            return [_uncertain(path) for path in paths]
        if op not in (ops.BRANCH, ops.GROUPREF_EXISTS):
            return paths or [()]
        is_told = op is ops.BRANCH and _begin_apart(value[1])
        choice = _Step(_all_of(paths), 1 if is_told else len(paths))
        return [(choice, *path) for path in paths] if _vary(paths) else [(choice,)]

    def _of_repeat(self, least: int, most: int, body: Any) -> list[_Path]:
        paths = self.of(body)
        times = (_Step(_all_of(paths), min(most - least + 1, ENDLESS), least > 0),) if most > least else ()
        if not _vary(paths):
            return [times] if times else [path if least else () for path in paths]
        if most > MANY:
            # Not refused above: no repeat varies in it, and alternatives are told by their first letters.
            return [times]
        return [times + path * least + _uncertain(path) * (most - least) for path in paths]

    def _taken_by(self, op: Any, value: Any) -> int:
        if op is ops.LITERAL and not self._state.flags & re.IGNORECASE:
            return 1 << self._alphabet.index(chr(value))
        name = op, tuple(value) if isinstance(value, list) else value
        if name not in self._taken:
            matcher = compiler.compile(parser.SubPattern(self._state, [(op, value)]))
            self._taken[name] = sum(1 << found.start() for found in matcher.finditer(self._alphabet))
        return self._taken[name]


def _named(items: Any) -> Iterator[str]:
    """Letters that a pattern names, and their neighbours: where two ranges overlap, one has an end of the other."""
    for item in items:
        if isinstance(item, tuple | list | parser.SubPattern):
            yield from _named(item)
        elif isinstance(item, int) and not isinstance(item, type(ops.LITERAL)):
            yield from (chr(code) for code in (item - 1, item, item + 1) if 0 <= code < 0x110000)


def _has_too_many_ways(path: _Path) -> bool:
    varying = [place for place, step in enumerate(path) if step.ways > 1]
    if math.prod(path[place].ways for place in varying) <= MOST_WAYS:
        return False
    if len(varying) > MOST_VARYING:
        return True
    groups: list[list[int]] = []
    for place in varying:
        joined = [group for group in groups if any(not _are_apart(path, other, place) for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append([*(one for group in joined for one in group), place])
    return any(math.prod(path[place].ways for place in group) > MOST_WAYS for group in groups)


def _are_apart(path: _Path, first: int, second: int) -> bool:
    """Whether no letter can be taken by the one as well as by the other."""
    mine, theirs = path[first].letters, path[second].letters
    between = path[first + 1 : second]
    return not mine & theirs or any(
        step.is_certain and not (step.letters & mine and step.letters & theirs) for step in between
    )


def _vary(paths: Iterable[_Path]) -> bool:
    return any(step.ways > 1 for path in paths for step in path)


def _all_of(paths: Iterable[_Path]) -> int:
    letters = 0
    for path in paths:
        for step in path:
            letters |= step.letters
    return letters


def _uncertain(path: _Path) -> _Path:
    return tuple(replace(step, is_certain=False) for step in path)
