# SPDX-License-Identifier: Apache-2.0
"""Values in the memory of Mooncake's clients, found by way of its master.

Mooncake keeps them in segments of DRAM that clients lend it: ``segment_gb`` of this server's own, or those of
`mooncake_client` processes beside it, which outlive it. It evicts by rules of its own. Every client listens on ports
that Mooncake chooses, on all interfaces, and asks nobody who he is: for networks that are trusted.
"""

from __future__ import annotations

import socket
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec

from banyan.core import Address
from banyan.features.stores.value_format import HeaderBuffer, ValueFormat
from banyan.features.stores.values import Iovec, Transfer, Value

GIB, MIB = 1 << 30, 1 << 20
MOST = 1 << 20
"""Of either unit: more than any machine has, and what its bytes are counted in holds it."""
ANSWERS_S = 3.0
"""So long the master is waited for at the start."""
LENDERS_S = 5.0
"""And so long for somebody who lends memory, who may be starting at the same time."""
LEAST_BYTES = 512 << 10
"""Its client asks the master for every value of every call."""
WAY_OUT = "pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1 (or its CUDA build), with libibverbs1"
NO_ROOM, NO_ANSWER = -200, -900
"""Of Mooncake's codes: no segment has room; the master or a client cannot be reached."""


class MooncakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a URL says behind its question mark. ``host``: this machine, as the other clients reach it."""

    metadata: str = "P2PHANDSHAKE"
    segment_gb: Annotated[float, msgspec.Meta(ge=0, le=MOST)] = 0.0
    buffer_mb: Annotated[int, msgspec.Meta(gt=0, le=MOST)] = 16
    protocol: str = "tcp"
    device: str = ""
    host: str = ""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> MooncakeOptions:
        """
        Raises:
            ValueError: for an option that there is not, or a value that it cannot have.
        """
        try:
            return msgspec.convert(options, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"mooncake:// options: {error}: use {', '.join(cls.__struct_fields__)}") from None


def own_host(master: Address) -> str:
    """This machine's address towards the master.

    Raises:
        OSError: when nobody answers there, with the way out.
    """
    try:
        with socket.create_connection((master.host, master.port), timeout=ANSWERS_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise OSError(
            f"no Mooncake master answers at {master} ({error}): start one with "
            f"`mooncake_master --rpc_address={master.host} --rpc_port={master.port}`"
        ) from error


def load_library() -> Any:
    """The class of its clients.

    Raises:
        ValueError: where it is not there, with the way out.
    """
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ValueError(f"Mooncake's library does not load ({error}): {WAY_OUT}") from error
    return MooncakeDistributedStore


class MooncakeValues:
    """Implements ``values.Values``."""

    def __init__(self, master: Address, options: MooncakeOptions, *, value_bytes: int) -> None:
        """
        Raises:
            ValueError: where the library is not there, or nobody lends memory; with the way out.
            OSError: when the master does not answer.
        """
        client = load_library()
        host = own_host(master)
        self._master = master
        self._value_bytes = value_bytes
        self._options = options
        self._store: Any = client()
        code = self._store.setup(
            options.host or host,
            options.metadata,
            int(options.segment_gb * GIB),
            options.buffer_mb * MIB,
            options.protocol,
            options.device,
            str(master),
        )
        if code:
            raise OSError(f"Mooncake's client does not start ({code}): see its own lines in the log, and the options")
        self._bases: list[int] = []
        self._probe()

    def _probe(self) -> None:
        """Write a value and remove it: a store in which nobody lends memory takes none."""
        header_buffer = HeaderBuffer(ValueFormat((8,)), 1)
        name = f"banyan-probe/{uuid.uuid4().hex}"
        self.register(Iovec(header_buffer.address, header_buffer.num_bytes))
        probe = Value(name, [Iovec(header_buffer.address, header_buffer.num_bytes)])
        deadline_s = time.monotonic() + LENDERS_S
        try:
            while not self._takes(probe, has_time=time.monotonic() < deadline_s):
                time.sleep(LENDERS_S / 25)
        except OSError as error:
            self.close()
            raise ValueError(
                f"{error}: lend it memory with `mooncake_client --master_server_address={self._master} "
                "--metadata_server=P2PHANDSHAKE --global_segment_size=...` on some machine, or with ?segment_gb= here"
            ) from error
        self.remove([name])
        self._store.unregister_buffer(header_buffer.address)
        self._bases.clear()

    def _takes(self, value: Value, *, has_time: bool) -> bool:
        """Whether it was written; raises why not when there is no time left."""
        try:
            return self.write([value])[0]
        except OSError:
            if not has_time:
                raise
            return False

    @property
    def engine(self) -> str:
        lent = f"lends {self._options.segment_gb:g} GiB" if self._options.segment_gb else "lends no memory"
        return f"Mooncake, master {self._master}, {self._options.protocol}, {lent}"

    @property
    def least_bytes(self) -> int:
        return LEAST_BYTES

    def register(self, iovec: Iovec) -> None:
        code = self._store.register_buffer(iovec.address, iovec.num_bytes)
        if code:
            raise OSError(f"Mooncake does not register {iovec.num_bytes} bytes ({code}): see its own lines in the log")
        self._bases = sorted([*self._bases, iovec.address])

    def present(self, names: Sequence[str]) -> list[bool]:
        codes = self._store.batch_is_exist(list(names))
        self._heed(codes)
        return [code == 1 for code in codes]

    def write(self, values: Sequence[Value]) -> list[bool]:
        codes = self._store.batch_put_from_multi_buffers(
            [value.name for value in values],
            [[part.address for part in value.parts] for value in values],
            [[part.num_bytes for part in value.parts] for value in values],
        )
        self._heed(codes)
        return [code == 0 for code in codes]

    @contextmanager
    def reading(self, names: Sequence[str]) -> Iterator[_Reading]:
        yield _Reading(self, names)

    def load(self, names: Sequence[str], transfers: Sequence[Transfer]) -> list[bool]:
        """Bytes of values, by their numbers in ``names``."""
        if all(transfer.start == 0 and transfer.num_bytes == self._value_bytes for transfer in transfers):
            codes = self._store.batch_get_into_multi_buffers(
                [names[transfer.number] for transfer in transfers],
                [[iovec.address for iovec in transfer.to] for transfer in transfers],
                [[iovec.num_bytes for iovec in transfer.to] for transfer in transfers],
            )
            self._heed(codes)
            return [code == self._value_bytes for code in codes]
        num_come = [0] * len(transfers)
        for base, parts in self._by_memory(transfers).items():
            (answers,) = self._store.get_into_ranges(
                [base],
                [[names[transfers[owner].number] for owner, _, _ in parts]],
                [[[iovec.address - base] for _, _, iovec in parts]],
                [[[start] for _, start, _ in parts]],
                [[[iovec.num_bytes] for _, _, iovec in parts]],
            )
            self._heed([code for (code,) in answers])
            for (owner, _, _), (code,) in zip(parts, answers, strict=True):
                num_come[owner] += max(0, code)
        return [come == transfer.num_bytes for come, transfer in zip(num_come, transfers, strict=True)]

    def _by_memory(self, transfers: Sequence[Transfer]) -> dict[int, list[tuple[int, int, Iovec]]]:
        """Whose part it is, where it starts in the value, and where it goes; by the base of the registered memory."""
        parts: dict[int, list[tuple[int, int, Iovec]]] = {}
        for owner, (_, start, to) in enumerate(transfers):
            for iovec in to:
                base = self._bases[bisect_right(self._bases, iovec.address) - 1]
                parts.setdefault(base, []).append((owner, start, iovec))
                start += iovec.num_bytes
        return parts

    def remove(self, names: Sequence[str]) -> int:
        # By force: whoever reads such a value just now finds out by its checksums.
        codes = self._store.batch_remove(list(names), True) if names else []
        self._heed(codes)
        return sum(code == 0 for code in codes)

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self._store.close()

    def _heed(self, codes: Sequence[int]) -> None:
        """Raises OSError where all have failed for a reason that is none of the values'."""
        if not codes or any(code not in (NO_ROOM, NO_ANSWER) for code in codes):
            return
        if codes[0] == NO_ROOM:
            raise OSError("no segment of Mooncake has room")
        raise OSError(f"Mooncake's master at {self._master} does not answer")


class _Reading:
    def __init__(self, values: MooncakeValues, names: Sequence[str]) -> None:
        self._values = values
        self._names = names

    def load(self, transfers: Sequence[Transfer]) -> list[bool]:
        return self._values.load(self._names, transfers) if transfers else []
