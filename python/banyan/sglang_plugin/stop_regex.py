# SPDX-License-Identifier: Apache-2.0
"""Which patterns Python's matcher may try in exponentially many ways: ``(a+)+b`` keeps it busy for years over fifty
letters, and with it the rank whose scheduler looks for it.

A repeat of varying length within one of more than ``MANY`` times is taken for such, and so are alternatives within one
that do not begin with different letters. Some of these are harmless: ``(a+,)+``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT)
MANY = 8


def may_not_end(pattern: str) -> bool:
    """Raises re.error, or RecursionError, for what is no pattern."""
    return _may_not_end(parser.parse(pattern), is_repeated=False)


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


def _within(op: Any, value: Any) -> Sequence[Iterable[tuple[Any, Any]]]:
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
