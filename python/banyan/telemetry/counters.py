# SPDX-License-Identifier: Apache-2.0
"""Plain counters of one rank. They only grow; ``/metrics`` and ``/server_info`` read them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Each field's meaning is its documentation in ``/metrics``."""

    lookups: int = 0
    lookup_hits: int = 0
    fetches: int = 0
    fetches_refused: int = 0
    fetches_failed: int = 0
    fetched_pages: int = 0
    fetched_bytes: int = 0
    copied_bytes: int = 0
    copy_us: int = 0
    wait_us: int = 0
    published_pages: int = 0
    retired_pages: int = 0
    quarantined_pages: int = 0
    resets: int = 0
    backed_up_pages: int = 0
    backups_dropped_pages: int = 0
    backups_failed: int = 0
    reads: int = 0
    read_pages: int = 0
    read_bytes: int = 0
    read_us: int = 0
    read_failed_pages: int = 0
    reads_dropped_pages: int = 0
    archived_pages: int = 0
    archive_refused_pages: int = 0
    archive_failed_pages: int = 0
    forwards: int = 0
    forward_us: int = 0
    control_us: int = 0

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


DESCRIPTIONS = {
    "lookups": "prefix tails looked up at the peers",
    "lookup_hits": "of these, tails of which a peer held at least one page",
    "fetches": "leases granted, one for each request that fetched",
    "fetches_refused": "leases refused because a page moved after the lookup; the request was computed instead",
    "fetches_failed": "copies that did not land; SGLang aborts the requests of that batch",
    "fetched_pages": "pages copied out of a peer's pool",
    "fetched_bytes": "bytes read from peers' pools",
    "copied_bytes": "bytes written to this rank's pool, local duplicates of one fetch included",
    "copy_us": "time of the copy thread",
    "wait_us": "time the forward pass waited for a layer",
    "published_pages": "pages offered to the peers",
    "retired_pages": "pages given back by SGLang's tree or requests",
    "quarantined_pages": "of these, pages that a peer was still reading",
    "backed_up_pages": "pages copied from this rank's pool to the host arena",
    "backups_dropped_pages": "pages not backed up: no frame in the arena, or too many copies on their way",
    "backups_failed": "copies to the host arena that did not land",
    "reads": "reads from the store that were started",
    "read_pages": "pages that were read from the store and verified",
    "read_bytes": "bytes read from the store",
    "read_us": "time from the first to the last of each read",
    "read_failed_pages": "pages that the store could not read, or that failed their checksum",
    "reads_dropped_pages": "pages in the store that were not read: no frame, or too many reads on their way",
    "archived_pages": "pages that the store has written durably",
    "archive_refused_pages": "pages that were not worth a write, or that the store did not take",
    "archive_failed_pages": "pages that the store could not write",
    "resets": "flushes of this rank's cache",
    "forwards": "forward passes timed by the per-layer clock",
    "forward_us": "time of these forward passes, from the first to the last layer's KV read",
    "control_us": "time the scheduler thread spent inside Banyan, waits for layers not counted",
}
