# SPDX-License-Identifier: Apache-2.0
"""A rank's door to the store that the flags name: which weights its pages belong to, and what it may write."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from huggingface_hub import snapshot_download

from banyan.config import Config
from banyan.layout import BlockGeometry
from banyan.layout.checkpoint import checkpoint_digest
from banyan.pacing import Admission, WriteAdmission, WriteBudget
from banyan.ports import PageStore
from banyan.refusals.start import store_refusal, weights_refusal
from banyan.sglang_plugin import runtime
from banyan.store import Space, StoreLocation
from banyan.store import open_store as open_named_store

logger = logging.getLogger("banyan")


def open_store(
    config: Config, *, namespace: bytes, block: BlockGeometry, num_parts: int, share: float = 1.0
) -> PageStore:
    """This rank's door to the store that the flags name, for its ``share`` of a part. Refuses what the store refuses,
    naming the flag."""
    space = Space(
        quota_bytes=config.store_bytes,
        share_bytes=int(config.store_bytes * share) // num_parts,
        read_bytes_per_s=int(config.store_read_mb_per_s * 1e6) or None,
    )
    try:
        location = StoreLocation.parse(config.store)
        store = open_named_store(location, namespace=namespace, layer_bytes=block.layer_bytes, space=space)
    except (OSError, ValueError) as error:
        runtime.refuse(store_refusal(paths=config.store, error=error))
    logger.info("banyan: store on %s: %s", location, store.engine)
    return store


def weights_digest(model_path: str, revision: str | None) -> str:
    """What tells these weights from any others. Refuses when they are not in files that can be read."""
    folder = Path(model_path)
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(model_path, revision=revision, local_files_only=True))
        return checkpoint_digest(folder)
    except (OSError, ValueError) as error:
        runtime.refuse(weights_refusal(error))


def make_admission(config: Config, *, num_parts: int, share: float = 1.0) -> WriteAdmission:
    """What this rank may write: its part of the server's budget, or its ``share`` of that."""
    budget = None
    if config.store_write_bytes_per_day:
        per_day = max(1, int(config.store_write_bytes_per_day * share) // num_parts)
        # A twelfth: two hours' worth at once, for conversations come in bursts.
        budget = WriteBudget(bytes_per_day=per_day, burst_bytes=max(1, per_day // 12), now_ns=time.monotonic_ns())
    admission = Admission.FIRST_SIGHT if config.store_admit == "first" else Admission.SECOND_SIGHT
    return WriteAdmission(admission, budget=budget)
