# SPDX-License-Identifier: Apache-2.0
"""``banyan config``: a file of knobs, looked at before a server reads it, and written down with every knob in it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from banyan import config, knob_file
from banyan.config import Config
from banyan.router import settings
from banyan.router.settings import Settings

TABLES = (config.FILE_TABLE, settings.FILE_TABLE)
HEAD = """# Banyan's knobs. Table [server] is read by `--enable-banyan --banyan-config FILE`, table [router] by
# `banyan route --config FILE`. Flags on the command line win. A commented key has the value that is shown.
"""


def add_parsers(commands: Any) -> None:
    """Add ``banyan config``."""
    parser = commands.add_parser("config", help="check a file of knobs (--banyan-config), or write one down")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    check = verbs.add_parser("check", help="say what is wrong with a file, line by line; exit status 2 if anything is")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(run=_check)
    show = verbs.add_parser("show", help="print a file with every knob: those of FILE as they are, others commented")
    show.add_argument("file", type=Path, nargs="?", metavar="FILE")
    show.set_defaults(run=_show)


def _check(args: argparse.Namespace) -> int:
    wrong = problems(args.file)
    for line in wrong:
        print(f"banyan config: {line}", file=sys.stderr)
    if not wrong:
        print(f"{args.file}: well")
    return 2 if wrong else 0


def problems(path: Path) -> list[str]:
    """Everything that is wrong with a file, a line each; first each key by itself, then what does not go together."""
    try:
        knob_file.check_tables(path, [table.name for table in TABLES])
    except ValueError as error:
        return [str(error)]
    wrong = []
    for table in TABLES:
        try:
            taken = knob_file.read(path, table)
            if taken:
                _build(table.settings, taken)
        except ValueError as error:
            wrong += [line if line.startswith(f"{path}:") else f"{path}: {line}" for line in str(error).splitlines()]
    return wrong


def _build(made: type, taken: dict[str, Any]) -> None:
    """Raises ValueError where values do not go together. A file may leave the router's servers to the flags."""
    if made is Config:
        Config(**{"policy": config.DEFAULT_POLICY if _looks_up(taken) else config.SGLANG_POLICY, **taken})
        return
    lists = {name: tuple(taken.pop(name, ())) for name in settings.FILE_TABLE.lists}
    if any(lists.values()):
        Settings(servers=lists["server"], prefills=lists["prefill"], decodes=lists["decode"], **taken)


def _looks_up(taken: dict[str, Any]) -> bool:
    return taken.get("share") != "off" and taken.get("prefix_hints", True)


def _show(args: argparse.Namespace) -> int:
    try:
        given = {table.name: knob_file.read(args.file, table) if args.file else {} for table in TABLES}
    except ValueError as error:
        print(f"banyan config: {error}", file=sys.stderr)
        return 2
    print(HEAD)
    for table in TABLES:
        print(knob_file.template(table, given[table.name]))
    return 0
