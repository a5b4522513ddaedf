# SPDX-License-Identifier: Apache-2.0
"""Values in a Mooncake cluster (``mooncake-transfer-engine-non-cuda``, or the CUDA build).

The cluster's pages live in the memory of its nodes and leave when it sees fit: every miss is "gone", never an error.
Its default lease (10 s) must outlast one read; a shorter one shows as pages that are gone.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any


class MooncakeValues:
    """One client of a running ``mooncake_master``.

    Raises ImportError, naming the package, when it is not installed, and OSError when the cluster does not answer.
    """

    def __init__(self, master: str, *, segment_bytes: int, buffer_bytes: int, host: str = "127.0.0.1") -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ImportError(
                f"the mooncake backend needs mooncake-transfer-engine-non-cuda, and libibverbs1 of the system: {error}"
            ) from error
        self._client: Any = MooncakeDistributedStore()
        status = self._client.setup(host, "P2PHANDSHAKE", segment_bytes, buffer_bytes, "tcp", "", master)
        if status:
            raise OSError(errno.ECONNREFUSED, f"no Mooncake master at {master} (status {status})")

    def put(self, name: str, value: Sequence[memoryview]) -> None:
        status = self._client.put(name, b"".join(value))
        if status:
            raise OSError(errno.EIO, f"Mooncake refused {name} (status {status})")

    def get(self, name: str, num_bytes: int) -> bytes | None:
        # An absent value and a failed transfer both come back empty; either way the page is computed again.
        return self._client.get(name) or None

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [answer == 1 for answer in self._client.batch_is_exist(list(names))]

    def remove(self, name: str) -> None:
        # Refused while somebody holds a lease on it: the cluster evicts it later.
        self._client.remove(name)

    def close(self) -> None:
        self._client.close()
