# SPDX-License-Identifier: Apache-2.0
"""How often the scheduler threads have waited for the device, by the traces of SGLang's profiler."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

CALLS = ("cuda_runtime", "cuda_driver")


def count(folder: Path) -> Counter[str]:
    """Names and numbers of the calls that wait, over all ranks' traces in ``folder``.

    Raises:
        ValueError: when there is no trace, or one that shows no call of the driver at all: it proves nothing.
    """
    waits: Counter[str] = Counter()
    num_calls = 0
    for path in folder.rglob("*.trace.json.gz"):
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") in CALLS]
        num_calls += len(names)
        waits.update(name for name in names if "Synchronize" in name)
    if num_calls == 0:
        raise ValueError(f"no trace below {folder} shows a call of the driver")
    return waits
