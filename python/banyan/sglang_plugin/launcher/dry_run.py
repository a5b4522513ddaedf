# SPDX-License-Identifier: Apache-2.0
"""What the launcher would do with a command line, without a server: ``python -m`` this module, then the arguments.
Banyan is on, whether they turn it on or not; flags of its own without the one that turns it on are refused, as there.

One line of JSON on stdout. Arguments take the way that they take when a server starts, through the same hooks, up to
the point where SGLang would start processes; then a tree is built, as a rank would build it. What else ranks find out
(a pool of an unknown class, too little memory) is not seen.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Sequence
from itertools import pairwise
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import yaml
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

from banyan.config import FLAGS_VARIABLE, flags_in_environment
from banyan.refusals import words_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import tried_tree

TURNED_ON = "--enable-banyan"

OF_ITS_OWN = "--banyan-"
"""What the names of its other flags begin with."""


def _in_file(arguments: Sequence[str]) -> list[str]:
    """The flags in the file that they name, but those that it switches off. What is wrong with it SGLang says."""
    # SGLang passes over one that is joined to its file by "=".
    for flag, file in pairwise(arguments):
        if flag == "--config":
            with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
                flags = yaml.safe_load(Path(file).read_text())
                given = flags.items() if isinstance(flags, dict) else ()
                return [f"--{name}".replace("_", "-") for name, value in given if value not in (None, False)]
    return []


def examine(arguments: Sequence[str]) -> dict[str, Any]:
    """What is refused (by Banyan), what has failed (in SGLang), what would be set, and what is worth knowing."""
    load_plugins()
    logger, notes, printed = logging.getLogger("banyan"), BufferingHandler(sys.maxsize), io.StringIO()
    notes.setLevel(logging.WARNING)
    said: dict[str, Any] = {"refused": [], "failed": [], "is_off": False, "settled": {}, "choices": None, "store": []}
    try:
        words = flags_in_environment()
    except ValueError as error:
        return {**said, "refused": [words_refusal(FLAGS_VARIABLE, error)], "is_asked": True, "notes": []}
    named = [*arguments, *_in_file(arguments)]
    said["is_asked"] = TURNED_ON in named or words is not None
    # The command line has the last word: with the flag on it the environment would not be asked.
    is_to_be_added = not (said["is_asked"] or any(flag.startswith(OF_ITS_OWN) for flag in named))
    added = [TURNED_ON] if is_to_be_added else []
    logger.addHandler(notes)
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(printed):
            server_args = prepare_server_args([*added, *arguments])
            server_args.resolve_once()
            server_args.check_server_args()
            said |= _settled(server_args)
    except SystemExit:
        lines = printed.getvalue().splitlines()
        said["refused"] = [line.removeprefix(runtime.REFUSED) for line in lines if line.startswith(runtime.REFUSED)]
        # argparse ends with the line that says what is wrong.
        said["failed"] = [] if said["refused"] else lines[-1:] or ["SGLang prints something and ends"]
    except Exception as error:  # noqa: BLE001 - whatever SGLang raises over its arguments is the answer
        said["failed"] = [f"{type(error).__name__}: {error}".replace("\n", " ")]
    finally:
        logger.removeHandler(notes)
    return {**said, "notes": [note.getMessage().removeprefix("banyan: ") for note in notes.buffer]}


def _settled(server_args: ServerArgs) -> dict[str, Any]:
    carried = runtime.bookkeeping(server_args)
    if carried is None:
        return {"is_off": True}
    wanted, view = carried["config"], resolved_view(server_args)
    return {
        "settled": {
            "ranks": view.dp_size,
            "page size": view.page_size,
            "attention": view.attention_backend,
            "sharing": wanted.share,
            "policy": wanted.policy,
            "tree": tried_tree.build(server_args) if wanted.shares else "as without Banyan",
        },
        "choices": carried["choices"],
        "store": wanted.store,
        "port": server_args.port,
    }


if __name__ == "__main__":
    print(json.dumps(examine(sys.argv[1:])))
