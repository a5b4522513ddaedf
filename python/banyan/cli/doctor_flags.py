# SPDX-License-Identifier: Apache-2.0
"""``banyan doctor -- ARGUMENTS``: what a server would say to them, from the code that would start it.

That code imports SGLang, so it runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from banyan.cli.finding import Finding

DRY_RUN = "banyan.sglang_plugin.launcher.dry_run"
TURNED_ON = "--enable-banyan"


def launch_arguments(words: Sequence[str]) -> list[str]:
    """The arguments of a launch command, which may be given whole; with Banyan turned on."""
    first = next((number for number, word in enumerate(words) if word.startswith("--")), len(words))
    arguments = list(words[first:])
    return arguments if TURNED_ON in arguments else [*arguments, TURNED_ON]


def examine_flags(words: Sequence[str]) -> tuple[list[Finding], Sequence[str]]:
    """What is refused, and what would be set; and the store that these arguments name, in the parts of its flag."""
    arguments = launch_arguments(words)
    done = subprocess.run(
        [sys.executable, "-m", DRY_RUN, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    try:
        said = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        advice = "install SGLang and Banyan into one environment; the findings above say what is missing"
        return [Finding("launch arguments", False, f"the dry run ended with {done.returncode}: {last}", advice)], ()
    return findings_of(said, asked=TURNED_ON in words), said["store"]


def findings_of(said: dict[str, Any], *, asked: bool) -> list[Finding]:
    """``said``: what the dry run printed. ``asked``: whether the user's own words turn Banyan on."""
    found = []
    for line in said["refused"]:
        reason, _, way_out = line.rpartition(": ")
        found.append(Finding("launch arguments", False, reason or line, way_out))
    for line in said["failed"]:
        found.append(Finding("launch arguments", False, line, "SGLang itself refuses this: see its own message"))
    if said["is_off"]:
        advice = f"install the SGLang that this release is for, or start without {TURNED_ON}"
        found.append(Finding("launch arguments", False, "Banyan would turn itself off", advice))
    for line in said["notes"]:
        found.append(Finding("launch arguments", True, "accepted with a note", hint=line))
    if said["choices"] is not None:
        found.append(_choices(said["choices"]))
    if not found or all(finding.is_ok for finding in found):
        settled = ", ".join(f"{name} {value}" for name, value in said["settled"].items())
        hint = "" if asked else f"add {TURNED_ON} to them"
        found.append(Finding("launch arguments", True, f"a server would start: {settled}", hint=hint))
    return found


def _choices(choices: dict[str, Any]) -> Finding:
    """What SGLang chooses beside Banyan, and by itself."""
    if choices["without"] is None:
        return Finding("SGLang's choices", True, f"{choices['with']} (the CPU engine's are Banyan's)")
    detail = f"{choices['with']}; without Banyan: {choices['without']}"
    hint = "" if choices["is_kept"] else "name the attention backend and the page size that you want yourself"
    return Finding("SGLang's choices", True, detail, hint=hint)
