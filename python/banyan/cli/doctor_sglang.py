# SPDX-License-Identifier: Apache-2.0
"""What ``banyan doctor`` says of a model (``banyan doctor MODEL``) and of launch arguments (``banyan doctor --
ARGUMENTS``), before anything is loaded.

The code that decides when a server starts decides here. It imports SGLang, so it runs in a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from banyan.cli.doctor_limits import SERVER_PORT, port
from banyan.cli.finding import Finding

DESCRIBE = "banyan.sglang_plugin.launcher.model"
DRY_RUN = "banyan.sglang_plugin.launcher.dry_run"
TURNED_ON = "--enable-banyan"
VARIABLE = re.compile(r"[A-Za-z_]\w*=")

MEDIA = (
    "prompts with images, video or audio share pages too; the dispatcher knows who holds what of them for Qwen3-VL, "
    "and for Qwen's other models and dots with --mm-preprocess-cache-size-mb 256; of other models it goes by load"
)


def examine_model(model_path: str, draft_path: str | None = None) -> Finding:
    """What a server would say of the model in this folder, or of this name, with this draft or without one."""
    said, error = _asked(DESCRIBE, model_path, *([] if draft_path is None else [draft_path]))
    if said is None:
        advice = "name a folder with a configuration that SGLang reads"
        return Finding("model", False, f"{model_path}: {error}", advice)
    return model_finding(said)


def model_finding(said: dict[str, Any]) -> Finding:
    """``said``: what ``DESCRIBE`` printed."""
    if said["refused"] is not None:
        return Finding.refused("model", said["refused"])
    parts, page_tokens = said["bytes_by_part"], said["page_tokens"]
    total = sum(parts.values())
    detail = (
        f"{said['architecture']} is shared; a page of {page_tokens} tokens weighs {total} bytes "
        f"({', '.join(f'{name} {num_bytes}' for name, num_bytes in parts.items())}) over {said['num_layers']} layers "
        f"in {said['dtype']}, {total // page_tokens} bytes a token{_of_a_state(said)}"
    )
    return Finding("model", True, detail, hint=MEDIA if said["takes_media"] else "")


def _of_a_state(said: dict[str, Any]) -> str:
    """What a prefix takes besides its pages, of a model that keeps states."""
    parts = said.get("state_bytes_by_part")
    if parts is None:
        return ""
    return (
        f"; a state, which goes with the end of a prefix, weighs {sum(parts.values())} bytes "
        f"({', '.join(f'{name} {num_bytes}' for name, num_bytes in parts.items())}) over {said['num_state_layers']} "
        "other layers"
    )


def launch_arguments(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """``(variables, arguments)`` of a launch command, which may be given whole; variables are the NAME=VALUE before
    it."""
    # What starts the server may have flags of its own, as `numactl --interleave=all` does; a model may be called serve.
    starts = (
        number + 1
        for number, word in enumerate(words)
        if word == "sglang.launch_server" or (word == "serve" and number and Path(words[number - 1]).name == "sglang")
    )
    behind = next(starts, 0)
    flags = (number for number, word in enumerate(words) if number >= behind and word.startswith("--"))
    first = next(flags, len(words))
    command, arguments = words[:first], list(words[first:])
    if behind and words[behind - 1] == "serve" and len(command) > behind:
        # `sglang serve MODEL`
        arguments[:0] = ["--model-path", command[behind]]
    return [word for word in command if VARIABLE.match(word)], arguments


def examine_flags(words: Sequence[str]) -> tuple[list[Finding], Sequence[str]]:
    """What is refused, and what would be set; and the store that these arguments name, in the parts of its flag."""
    variables, arguments = launch_arguments(words)
    said, error = _asked(DRY_RUN, *arguments, variables=variables)
    if said is None:
        advice = "install SGLang and Banyan into one environment; the findings above say what is missing"
        return [Finding("launch arguments", False, f"the dry run ended: {error}", advice)], ()
    number = said.get("port", SERVER_PORT)
    ports = [port("port of this server", number)] if number != SERVER_PORT else []
    return [*flag_findings(said), *ports], said["store"]


def flag_findings(said: dict[str, Any]) -> list[Finding]:
    """``said``: what the dry run printed."""
    found = [Finding.refused("launch arguments", line) for line in said["refused"]]
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
        hint = "" if said["is_asked"] else f"add {TURNED_ON} to them"
        found.append(Finding("launch arguments", True, f"a server would start: {settled}", hint=hint))
    return found


def _choices(choices: dict[str, Any]) -> Finding:
    """What SGLang chooses beside Banyan, and by itself."""
    if choices["without"] is None:
        return Finding("SGLang's choices", True, f"{choices['with']} (the CPU engine's are Banyan's)")
    detail = f"{choices['with']}; without Banyan: {choices['without']}"
    hint = "" if choices["is_kept"] else "name the attention backend and the page size that you want yourself"
    return Finding("SGLang's choices", True, detail, hint=hint)


def _asked(module: str, *arguments: str, variables: Sequence[str] = ()) -> tuple[dict[str, Any] | None, str]:
    """What ``module`` prints of ``arguments``, with these NAME=VALUE in its environment; None and its last words where
    it breaks."""
    command = [*(("env", *variables) if variables else ()), sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    try:
        return json.loads(done.stdout.splitlines()[-1]), ""
    except (IndexError, json.JSONDecodeError):
        return None, (done.stderr.strip().splitlines() or [f"it said nothing (status {done.returncode})"])[-1]
