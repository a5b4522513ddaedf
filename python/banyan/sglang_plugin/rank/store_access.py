# SPDX-License-Identifier: Apache-2.0
"""A rank's access to the store that the flags name: which weights its pages belong to, and what it may write."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from banyan.config import Config, cache_folder
from banyan.layout import BlockGeometry
from banyan.layout.checkpoint import checkpoint_digest
from banyan.layout.file_digests import MEMORY_NAME
from banyan.pacing.admission import Admission, WriteAdmission
from banyan.pacing.allowance import Allowance
from banyan.ports import PageStore
from banyan.refusals.start import store_refusal, weights_refusal
from banyan.sglang_plugin import model_files, runtime
from banyan.store.backends import Space
from banyan.store.backends import open_store as open_named_store
from banyan.store.location import StoreLocation

logger = logging.getLogger("banyan")

DAY_S = 24 * 3600


def open_store(
    config: Config, *, namespace: bytes, block: BlockGeometry, num_parts: int, share: float = 1.0
) -> PageStore:
    """This rank's access to the store that the flags name, for its ``share`` of a part. Refuses what the store refuses,
    naming the flag."""
    space = Space(
        quota_bytes=config.store_bytes,
        share_bytes=int(config.store_bytes * share) // num_parts,
        read_bytes_per_s=max(1, int(config.store_read_mb_per_s * 1e6 * share)) if config.store_read_mb_per_s else None,
    )
    try:
        location = StoreLocation.parse(config.store)
        store = open_named_store(location, namespace=namespace, layer_bytes=block.layer_bytes, space=space)
    except (OSError, ValueError) as error:
        runtime.refuse(store_refusal(paths=config.store, error=error))
    logger.info("banyan: store on %s: %s", location, store.engine)
    return store


def weights_digest(config: Config, model_path: str, revision: str | None) -> str:
    """What tells these weights from any others. Refuses when they are not in files that can be read.

    Every rank asks; the first of them reads the files, and the others what it has found."""
    try:
        found = checkpoint_digest(model_files.folder_of(model_path, revision), digests_memory(config))
    except (OSError, ValueError) as error:
        runtime.refuse(weights_refusal(error))
    reading = found.reading
    if reading.num_read_bytes:
        logger.info("banyan: weights digested: %.1f GB in %.1f s", reading.num_read_bytes / 1e9, reading.read_s)
    if reading.obstacle:
        logger.warning(
            "banyan: each rank digests the weights, at each start: nothing is remembered: %s", reading.obstacle
        )
    return found.sha256


def digests_memory(config: Config) -> Path | None:
    """Where digests of weights are remembered: in the store's folder, which outlives a container, or else with the
    user's caches."""
    try:
        paths = StoreLocation.parse(config.store).paths if config.store else ()
    except ValueError as error:
        runtime.refuse(store_refusal(paths=config.store, error=error))
    # A folder that is not there, or empty, is for the store to make, or to refuse: its drive may be missing.
    store = Path(paths[0]) if paths else None
    folder = store if store is not None and store.is_dir() and any(store.iterdir()) else cache_folder()
    return None if folder is None else folder / MEMORY_NAME


def make_budget(config: Config, *, num_parts: int, share: float = 1.0) -> Allowance | None:
    """Of what this rank may write, whatever its weights: its part of the server's budget, or its ``share`` of that.
    None: as much as it likes."""
    if not config.store_write_bytes_per_day:
        return None
    per_day = max(1, int(config.store_write_bytes_per_day * share) // num_parts)
    # A twelfth: two hours' worth at once, for conversations come in bursts.
    return Allowance(per_s=per_day / DAY_S, burst=max(1, per_day // 12), now_s=time.monotonic())


def make_admission(config: Config, budget: Allowance | None) -> WriteAdmission:
    """What pages of one namespace are worth a write."""
    admission = Admission.FIRST_ACCESS if config.store_admit == "first" else Admission.SECOND_ACCESS
    return WriteAdmission(admission, budget=budget)
