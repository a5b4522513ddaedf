# SPDX-License-Identifier: Apache-2.0
"""SGLang's file backend on one folder, timed on request: the other end of ``banyan bench store``.

    python -m banyan_lab.bench.store.sglang_files FOLDER NUM_BLOCKS BLOCK_BYTES

Answers each line of its input, "ready", "put" or "get", with one line of JSON: the seconds it took.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig


class FileBackend:
    """A put is durable when it has been timed; a get is cold."""

    def __init__(self, folder: Path, num_blocks: int, block_bytes: int) -> None:
        self._folder = folder
        self._sources = torch.randint(0, 255, (num_blocks, block_bytes), dtype=torch.uint8)
        self._targets = torch.zeros_like(self._sources)
        self._keys = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(num_blocks)]
        self._order = torch.randperm(num_blocks).tolist()

    def _open(self) -> HiCacheFile:
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench",
        )
        return HiCacheFile(config, str(self._folder))

    def put(self) -> float:
        shutil.rmtree(self._folder, ignore_errors=True)
        backend = self._open()
        start = time.perf_counter()
        if not backend.batch_set(self._keys, list(self._sources)):
            raise RuntimeError("the file backend stored not all blocks")
        # The backend syncs nothing. One sync of the machine is the cheapest way to make all of it durable.
        os.sync()
        return time.perf_counter() - start

    def get(self) -> float:
        for file in self._folder.iterdir():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        self._targets.zero_()
        backend = self._open()
        keys = [self._keys[index] for index in self._order]
        targets = [self._targets[index] for index in self._order]
        start = time.perf_counter()
        found = backend.batch_get(keys, targets)
        taken = time.perf_counter() - start
        if any(target is None for target in found) or not torch.equal(self._sources, self._targets):
            raise RuntimeError("the file backend returned other bytes than were put")
        return taken


def main() -> None:
    backend = FileBackend(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    answers = {"ready": lambda: 0.0, "put": backend.put, "get": backend.get}
    for line in sys.stdin:
        print(json.dumps({"seconds": answers[line.strip()]()}), flush=True)


if __name__ == "__main__":
    main()
