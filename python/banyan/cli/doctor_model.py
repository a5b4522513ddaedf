# SPDX-License-Identifier: Apache-2.0
"""``banyan doctor MODEL``: whether a model is shared, and what one of its pages weighs, before anything is loaded.

The code that decides when a server starts decides here. It imports SGLang, so it runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from banyan.cli.finding import Finding

DESCRIBE = "banyan.sglang_plugin.launcher.model"

MEDIA = (
    "prompts with images, video or audio share pages too; the dispatcher knows who holds what of them for Qwen3-VL, "
    "and for Qwen's other models and dots with --mm-preprocess-cache-size-mb 256; of other models it goes by load"
)


def examine_model(model_path: str, draft_path: str | None = None) -> Finding:
    """What a server would say of the model in this folder, or of this name, with this draft or without one."""
    command = [sys.executable, "-m", DESCRIBE, model_path, *([] if draft_path is None else [draft_path])]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    try:
        return finding_of(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return Finding("model", False, f"{model_path}: {last}", "name a folder with a configuration that SGLang reads")


def finding_of(said: dict[str, Any]) -> Finding:
    """``said``: what the other process printed."""
    if said["refused"] is not None:
        reason, _, way_out = said["refused"].rpartition(": ")
        return Finding("model", False, reason, way_out)
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
