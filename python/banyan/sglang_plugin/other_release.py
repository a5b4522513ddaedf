# SPDX-License-Identifier: Apache-2.0
"""SGLang is another release than the one that Banyan works on: of Banyan there is one flag, at which a server ends.

Nothing else of Banyan is loaded: what it imports of SGLang may be gone, and what it would be put on may be another.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from banyan.config import names_flags
from banyan.refusals import REFUSED, release_refusal

logger = logging.getLogger("banyan")


def register(version: str) -> None:
    if multiprocessing.parent_process() is not None:
        # Its server was started without the flag.
        return
    line = release_refusal(version)
    if names_flags():
        refuse(line)
    logger.warning("banyan: not here: %s", line)
    # Imported here: without hooks SGLang knows no such flag, and ends at it.
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_add_cli_args(result: None, *args: Any, **named: Any) -> None:
        # What it is given there is not known.
        for parser in args:
            if isinstance(parser, argparse.ArgumentParser):
                _add_flag(parser, line)

    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", after_add_cli_args, HookType.AFTER)


def _add_flag(parser: argparse.ArgumentParser, line: str) -> None:
    class Refuse(argparse._StoreTrueAction):
        """To SGLang, which reads flags from files too, as any switch."""

        def __call__(self, parser: Any, namespace: Any, values: str | Sequence[Any] | None, option: Any = None) -> None:
            refuse(line)

    parser.add_argument("--enable-banyan", action=Refuse, help="Not with this release of SGLang.")


def refuse(line: str) -> NoReturn:
    print(f"{REFUSED}{line}", file=sys.stderr, flush=True)
    raise SystemExit(2)
