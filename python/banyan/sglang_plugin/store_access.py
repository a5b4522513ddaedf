# SPDX-License-Identifier: Apache-2.0
"""A rank's door to the store that the flags name: which weights its pages belong to, and what it may write."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from banyan import _native
from banyan.config import Config
from banyan.layout import BlockGeometry
from banyan.layout.checkpoint import checkpoint_digest
from banyan.pacing import Admission, WriteAdmission, WriteBudget
from banyan.sglang_plugin import runtime

logger = logging.getLogger("banyan")


def open_store(config: Config, *, namespace: bytes, block: BlockGeometry, num_shards: int) -> _native.Store:
    """This rank's door to the store that the flags name. Refuses what the store refuses, naming the flag."""
    try:
        store = _native.Store.open(
            list(config.store),
            namespace,
            block.layer_bytes,
            quota_bytes=config.store_bytes,
            share_bytes=config.store_bytes // num_shards,
            read_bytes_per_s=int(config.store_read_mb_per_s * 1e6) or None,
        )
    except (OSError, ValueError) as error:
        runtime.refuse(f"--banyan-store {','.join(config.store)}: {error}")
    logger.info("banyan: store on %s: %s", ", ".join(config.store), store.engine)
    return store


def weights_digest(server_args: Any) -> str:
    """What tells these weights from any others. Refuses when they are not in files that can be read."""
    folder = Path(server_args.model_path)
    try:
        if not folder.is_dir():
            revision = server_args.revision
            folder = Path(snapshot_download(server_args.model_path, revision=revision, local_files_only=True))
        return checkpoint_digest(folder)
    except (OSError, ValueError) as error:
        runtime.refuse(
            f"--banyan-store, --banyan-keep-host-arena: pages must know their weights; these cannot be told: {error}"
        )


def make_admission(config: Config, *, num_shards: int) -> WriteAdmission:
    """What this rank may write: its part of the server's budget."""
    budget = None
    if config.store_write_bytes_per_day:
        per_day = max(1, config.store_write_bytes_per_day // num_shards)
        # A twelfth: two hours' worth at once, for conversations come in bursts.
        budget = WriteBudget(bytes_per_day=per_day, burst_bytes=max(1, per_day // 12), now_ns=time.monotonic_ns())
    admission = Admission.FIRST_SIGHT if config.store_admit == "first" else Admission.SECOND_SIGHT
    return WriteAdmission(admission, budget=budget)
