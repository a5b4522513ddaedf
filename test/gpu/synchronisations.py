# SPDX-License-Identifier: Apache-2.0
"""How often the scheduler threads have waited for the device or for the driver's locks, by the traces of SGLang's
profiler."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CALLS = ("cuda_runtime", "cuda_driver")
OF_MEMORY = ("cudaHost", "cudaMalloc", "cudaFree", "cudaIpc", "cuMem", "cuIpc")
LONG_US = 1000.0
"""A call of memory that takes longer has waited: others of its names are copies, or served from what the driver has."""


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
        calls = [event for event in events if event.get("cat") in CALLS]
        num_calls += len(calls)
        # Other threads pin and open memory: they may take their time.
        ((scheduler, _),) = Counter(call.get("tid") for call in calls).most_common(1) or [(None, 0)]
        waits.update(call["name"] for call in calls if "Synchronize" in call["name"])
        waits.update(call["name"] for call in calls if call.get("tid") == scheduler and _is_long(call))
    if num_calls == 0:
        raise ValueError(f"no trace below {folder} shows a call of the driver")
    return waits


def _is_long(call: Mapping[str, Any]) -> bool:
    return call["name"].startswith(OF_MEMORY) and call.get("dur", 0.0) > LONG_US
