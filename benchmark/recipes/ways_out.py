# SPDX-License-Identifier: Apache-2.0
"""The way out that a refusal names, taken to the letter: the line that is refused becomes the line that it asks for.
And what comes of that: pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmark.recipes.lines import Line, Verdict

Judge = Callable[[Sequence[Line]], Sequence[tuple[Line, Verdict]]]

MOST_ROUNDS = 4
"""SGLang refuses by itself, too, and may do so behind what Banyan refuses."""

OFF = ("--banyan-share", "off")
FLAG = r"--[a-z][a-z0-9-]+"
WAYS = re.compile(
    rf"drop (?P<dropped>that flag|those flags)|use (?P<one>one of them)"
    rf"|use (?P<flag>{FLAG})(?: (?!or\b|where\b|in\b)(?P<value>\w+))?|use (?P<other>auto)\b"
)


def tried(found: Sequence[tuple[Line, Verdict]], judge: Judge) -> list[tuple[Line, Verdict]]:
    """The refused lines with the ways out that were named, one after the other, and where that has led."""
    ended, open_lines = [], [(line, verdict) for line, verdict in found if not verdict.is_shared]
    for _ in range(MOST_ROUNDS):
        changed = [replace(line, arguments=applied(line.arguments, verdict.reasons)) for line, verdict in open_lines]
        stuck = [one for one, line in zip(open_lines, changed, strict=True) if one[0] == line]
        ended += stuck
        judged = judge([line for one, line in zip(open_lines, changed, strict=True) if one[0] != line])
        ended += [one for one in judged if one[1].is_shared or one[1].has_crashed]
        open_lines = [one for one in judged if not (one[1].is_shared or one[1].has_crashed)]
    return [*ended, *open_lines]


def outcome(line: Line, verdict: Verdict) -> str:
    """In words."""
    if verdict.has_crashed:
        return "crashes"
    if not verdict.is_shared:
        return "refused again"
    return "starts, shares nothing" if line.arguments[-len(OFF) :] == OFF else "shared"


def applied(arguments: Sequence[str], reasons: Sequence[str]) -> tuple[str, ...]:
    """The first way out of each reason; a reason that names none, as SGLang's own do not, changes nothing."""
    changed = tuple(arguments)
    for reason in reasons:
        changed = _without_reason(changed, reason)
    # Who shares nothing is to be known by the end of the line.
    return (*(word for word in _without(changed, OFF[0])), *OFF) if OFF[0] in changed else changed


def _without_reason(arguments: tuple[str, ...], reason: str) -> tuple[str, ...]:
    way = WAYS.search(reason)
    named = re.findall(FLAG, reason.partition(": ")[0])
    if way is None or not (named or way["flag"]):
        return arguments
    if way["dropped"] == "that flag":
        return _without(arguments, named[0])
    if way["dropped"] or way["one"]:
        return _without(arguments, *named)
    if way["other"]:
        return (*_without(arguments, named[0]), named[0], way["other"])
    return (*arguments, way["flag"], *([way["value"]] if way["value"] else []))


def _without(arguments: Sequence[str], *flags: str) -> tuple[str, ...]:
    """Without these flags and their values."""
    kept: list[str] = []
    is_kept = True
    for word in arguments:
        if word.startswith("--"):
            is_kept = word.partition("=")[0] not in flags
        if is_kept:
            kept.append(word)
    return tuple(kept)
