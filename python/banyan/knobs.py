# SPDX-License-Identifier: Apache-2.0
"""A knob, written once: its field, its flag, its default, what it may be, and the sentence that explains it.

A settings class is a dataclass whose fields are made by ``knob``. The command line, the checks and the tables of the
documentation are read off it.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar, cast

T = TypeVar("T")

Check = Callable[[Any], str | None]
"""What a value should be, when it is not that; None for a good one."""

_METADATA = "banyan.knob"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One knob without its name, type and default, which are the field's.

    Attributes:
        flag: on the command line.
        group: the table of the documentation that it belongs to.
        text: one sentence for ``--help`` and for the documentation.
        metavar: what to write behind the flag; empty for a switch.
        parse: from text to the field's type; that of the default where it is a number.
        choices: all values, where they can be listed.
        const: the value of the flag without an argument, where it may stand without.
        unset: the default in words, where the value would say nothing.
        switches_to: what a flag without an argument sets the field to.
        is_open: the flag's own default is None: the settings class chooses for the user.
    """

    flag: str
    group: str
    text: str
    parse: Callable[[str], Any]
    metavar: str = ""
    choices: tuple[str, ...] = ()
    check: Check | None = None
    const: str | None = None
    unset: str = ""
    switches_to: bool | None = None
    is_open: bool = False


def knob(default: T, flag: str, group: str, text: str, **more: Any) -> T:
    """A dataclass field with everything that is known of its knob; see `Knob` for ``more``."""
    parse = type(default) if isinstance(default, int | float) else str
    made = Knob(flag=flag, group=group, text=inspect.cleandoc(text).replace("\n", " "), **{"parse": parse} | more)
    # Type checkers see the default, as with dataclasses' own ``field``.
    made_field: Any = field(default=default, metadata={_METADATA: made})
    return cast(T, made_field)


def knobs_of(settings: type) -> Iterable[tuple[str, Any, Knob]]:
    """``(field, default, knob)`` of a settings class, in the order of its fields."""
    for item in fields(settings):
        if _METADATA in item.metadata:
            assert item.default is not MISSING
            yield item.name, item.default, item.metadata[_METADATA]


def check(settings: Any) -> None:
    """Look at each value by itself.

    Raises:
        ValueError: for the first that is out of range, naming its flag.
    """
    for name, _, one in knobs_of(type(settings)):
        value = getattr(settings, name)
        if one.choices and value not in one.choices:
            raise ValueError(f"{one.flag} {value}: choose one of {', '.join(one.choices)}")
        wrong = one.check(value) if one.check is not None and value is not None else None
        if wrong is not None:
            raise ValueError(f"{one.flag} {value}: {wrong}")


def _meant(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse``, of what is a value: an empty one would be taken for none, a folder named ``~`` for a new one."""

    @functools.wraps(parse)
    def parsed(text: str) -> Any:
        if not text:
            raise argparse.ArgumentTypeError("nothing is said: is a variable unset? Drop the flag, or say a value")
        if text.startswith("~"):
            raise argparse.ArgumentTypeError(f"{text}: only a shell knows whose home ~ is: write the path out")
        return parse(text)

    return parsed


def add_to(parser: argparse._ActionsContainer, settings: type) -> None:
    """Add the flags of a settings class."""
    for _, default, one in knobs_of(settings):
        # argparse formats with %: a per cent sign of the text would be taken for one.
        text = one.text.replace("%", "%%")
        if one.switches_to is not None:
            parser.add_argument(one.flag, action="store_true", help=text)
            continue
        more: dict[str, Any] = {"type": _meant(one.parse)}
        if one.choices:
            more["choices"] = one.choices
        else:
            more["metavar"] = one.metavar
        if one.const is not None:
            more |= {"nargs": "?", "const": one.const}
        named = "" if one.is_open else f" Default: {shown(default, one)}."
        # No default here: what the user has not given is missing, and the class may choose it.
        parser.add_argument(one.flag, help=text + named, default=argparse.SUPPRESS, **more)


def given(values: Mapping[str, Any], settings: type) -> list[str]:
    """The flags of which argparse has found something."""
    found = []
    for _, _, one in knobs_of(settings):
        word = one.flag.lstrip("-").replace("-", "_")
        if word in values and (one.switches_to is None or values[word]):
            found.append(one.flag)
    return found


def take_from(values: Mapping[str, Any], settings: type) -> dict[str, Any]:
    """Field values: from what argparse has parsed, else the default; those that the user left open and the class
    decides are missing."""
    taken = {}
    for name, default, one in knobs_of(settings):
        word = one.flag.lstrip("-").replace("-", "_")
        if one.switches_to is not None:
            taken[name] = one.switches_to if values[word] else default
        elif word in values:
            taken[name] = values[word]
        elif not one.is_open:
            taken[name] = default
    return taken


def shown(default: Any, one: Knob) -> str:
    """A default for people."""
    if one.unset:
        return one.unset
    return "off" if one.switches_to is not None else f"{default:g}" if isinstance(default, float) else str(default)


def at_least(least: float, unit: str = "") -> Check:
    """No value below ``least``; NaN is none either."""
    return lambda value: None if value >= least else f"at least {least:g}{' ' if unit else ''}{unit}"


def from_zero_to(most: int) -> Check:
    """A whole number in this range."""
    return lambda value: None if 0 <= value <= most else f"from 0 to {most}"


def above_zero(what: str) -> Check:
    """A finite amount above 0."""
    return lambda value: None if 0 < value < float("inf") else f"{what}, above 0"


def zero_or_more(what: str, zero: str) -> Check:
    """A finite amount, or 0, which means ``zero``."""
    return lambda value: None if 0 <= value < float("inf") else f"{what}, or 0 for {zero}"
