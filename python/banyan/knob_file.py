# SPDX-License-Identifier: Apache-2.0
"""Knobs in a TOML file: a table for each settings class, a key for each flag.

A key is the name of its flag without the prefix of the table: ``host-gb`` in ``[server]`` is ``--banyan-host-gb``.
Values take the way of the command line, so what a flag refuses is refused here too, with the line of the file.
"""

from __future__ import annotations

import difflib
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banyan import knobs
from banyan.knobs import Knob

COLUMNS = 120


@dataclass(frozen=True, slots=True)
class KnobTable:
    """One table of the file.

    Attributes:
        name: in brackets.
        settings: the class whose knobs its keys are.
        prefix: of the flags, left out of the keys.
        lists: further keys, each of which holds a list of text.
    """

    name: str
    settings: type
    prefix: str = "--"
    lists: tuple[str, ...] = ()

    def knobs(self) -> dict[str, tuple[str, Any, Knob]]:
        """``(field, default, knob)`` by key, in the order of the fields."""
        return {
            one.flag.removeprefix(self.prefix): (field, default, one)
            for field, default, one in knobs.knobs_of(self.settings)
            if one.flag
        }


def read(path: Path, table: KnobTable) -> dict[str, Any]:
    """Field values, and the lists, that the file gives in ``table``; other tables are not looked at.

    Raises:
        ValueError: naming file, line, key and what it may be; all that is wrong, a line each.
    """
    text = text_of(path)
    taken: dict[str, Any] = {}
    wrong = []
    for key, value in _tables(path, text).get(table.name, {}).items():
        try:
            taken |= _taken(table, key, value)
        except ValueError as error:
            wrong.append(f"{path}:{line_of(text, table.name, key)}: {key}: {error}")
    if wrong:
        raise ValueError("\n".join(wrong))
    return taken


def check_tables(path: Path, known: Iterable[str]) -> None:
    """Look for tables that nobody would read.

    Raises:
        ValueError: for the first.
    """
    text = text_of(path)
    names = sorted(known)
    for name in _tables(path, text):
        if name not in names:
            choices = ", ".join(f"[{one}]" for one in names)
            raise ValueError(f"{path}:{line_of(text, name, None)}: {name}: there is no such table: use {choices}")


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


def _tables(path: Path, text: str) -> dict[str, dict[str, Any]]:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: this is not TOML: {error}") from error
    loose = [name for name, value in found.items() if not isinstance(value, dict)]
    if loose:
        raise ValueError(f"{path}:{line_of(text, '', loose[0])}: {loose[0]}: it stands in no table")
    return found


def _taken(table: KnobTable, key: str, value: Any) -> dict[str, Any]:
    key = key.replace("_", "-")
    if key in table.lists:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ValueError("a list of text")
        return {key: value}
    known = table.knobs()
    if key not in known:
        near = difflib.get_close_matches(key, [*known, *table.lists], 1)
        way_out = f"did you mean {near[0]}?" if near else f"use one of {', '.join([*known, *table.lists])}"
        raise ValueError(f"there is no such key: {way_out}")
    field, default, one = known[key]
    return {field: _parsed(value, default, one)}


def _parsed(value: Any, default: Any, one: Knob) -> Any:
    if one.switches_to is not None:
        if not isinstance(value, bool):
            raise ValueError("true or false")
        return one.switches_to if value else default
    if isinstance(value, bool) and not (value and one.const is not None):
        raise ValueError(f"{wanted(one)}, not true or false")
    if isinstance(value, dict):
        raise ValueError(f"{wanted(one)}, not a table")
    words = one.const if value is True else ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        parsed = one.parse(words or "")
    except ValueError as error:
        raise ValueError(f"{wanted(one)}, not {value!r}") from error
    if one.choices and parsed not in one.choices:
        raise ValueError(f"one of {', '.join(one.choices)}, not {value!r}")
    problem = one.check(parsed) if one.check is not None and parsed is not None else None
    if problem is not None:
        raise ValueError(f"{problem}, not {value!r}")
    return parsed


def wanted(one: Knob) -> str:
    """What a knob may be, in words."""
    return f"one of {', '.join(one.choices)}" if one.choices else one.metavar


def line_of(text: str, table: str, key: str | None) -> int:
    """The line in which ``key`` of ``table`` stands, or the table's own; 1 where it is written in another way."""
    inside = table == ""
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*[\"']?([\w-]+)", line)
        if header:
            inside = header[1] == table
            if inside and key is None:
                return number
        elif inside and key is not None and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return 1


def template(table: KnobTable, values: Mapping[str, Any]) -> str:
    """The table as a file: every key with its sentence; keys of ``values`` (by field) as they are, others commented."""
    lines = [f"[{table.name}]"]
    for name in table.lists:
        given = values.get(name)
        lines += [f"{'' if given else '# '}{name} = {_as_toml(given or [])}", ""]
    for key, (field, default, one) in table.knobs().items():
        lines += textwrap.wrap(one.text, COLUMNS, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        lines += [f"# One of {', '.join(one.choices)}."] if one.choices else []
        if field in values:
            value = values[field]
            switched = value != default if one.switches_to is not None else value
            lines += [f"{key} = {_as_toml(switched)}", ""]
        else:
            lines += [f"# {key} = {_default_as_toml(default, one)}", ""]
    return "\n".join(lines)


def _default_as_toml(default: Any, one: Knob) -> str:
    if one.switches_to is not None:
        return "false"
    return f"...  # left out: {one.unset}" if one.unset else _as_toml(default)


def _as_toml(value: Any) -> str:
    if value is None:
        return '"auto"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_as_toml(one) for one in value)}]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    # repr of a float is one of TOML's: 1.5, 1e-07, inf.
    return repr(value)
