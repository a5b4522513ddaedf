# SPDX-License-Identifier: Apache-2.0
"""What the launcher would do with lines for one kind of GPU, on the stand-in that this process sees.

    python -m benchmark.recipes.judging KIND < lines, one JSON object each > verdicts, one JSON object each

Each line is examined in a fork, as ``banyan doctor -- ARGUMENTS`` examines it; what it imports is imported once.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from typing import Any

LINE_S = 150

KINDS = {"hopper": ((9, 0), 141), "blackwell": ((10, 0), 180), "blackwell-ultra": ((10, 3), 288)}
"""Compute capability and GiB of memory."""

NUM_GPUS = 8


def be_seen(kind: str) -> None:
    """The stand-in's GPUs look like these."""
    from types import SimpleNamespace

    import torch

    capability, gib = KINDS[kind]
    seen = {**vars(torch.cuda.get_device_properties()), "major": capability[0], "minor": capability[1]}
    properties = SimpleNamespace(**{**seen, "total_memory": gib << 30, "name": f"NVIDIA {kind}"})
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *_: capability
    cuda.get_device_properties = lambda *_args, **_named: properties
    cuda.get_device_name = lambda *_: properties.name
    cuda.mem_get_info = lambda *_: (int(properties.total_memory * 0.98), properties.total_memory)
    cuda.get_arch_list = lambda: [f"sm_{capability[0]}{capability[1]}"]
    cuda.device_count = lambda: NUM_GPUS


def examined(line: dict[str, Any]) -> dict[str, Any]:
    """In a fork: the dry run's answer, or how the fork ended without one."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        signal.alarm(LINE_S)
        os.environ.update(line["variables"])
        os.write(writing, json.dumps(_say(line["arguments"])).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(said) if said else {"refused": [], "crashed": [f"ended with status {status}"]}


def _say(arguments: list[str]) -> dict[str, list[str]]:
    from banyan.sglang_plugin.launcher import dry_run

    try:
        said = dry_run.examine(arguments)
    except BaseException as error:  # noqa: BLE001 - a dry run that does not come back with an answer is a finding
        return {"refused": [], "crashed": [f"{type(error).__name__}: {error}"[:300]]}
    # On an SGLang that Banyan does not fit no line is judged.
    off = [f"Banyan turns itself off: {'; '.join(said['notes'])}"] if said["is_off"] else []
    return {"refused": [*said["refused"], *said["failed"]], "crashed": off}


def main() -> None:
    # What this process finds on its path, and nothing else does.
    os.environ.update(importlib.import_module("cuda_stand_in.engine").ENVIRONMENT)
    be_seen(sys.argv[1])
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for row in sys.stdin:
        print(json.dumps(examined(json.loads(row))), flush=True)


if __name__ == "__main__":
    main()
