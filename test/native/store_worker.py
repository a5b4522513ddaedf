# SPDX-License-Identifier: Apache-2.0
"""One round with a store in a process of its own; its first argument takes something away that the store would like."""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
import subprocess
import sys

import numpy as np

LAYER_BYTES = [4096, 8192]
FRAME_BYTES = sum(LAYER_BYTES)
NUM_PAGES = 8


def forbid_io_uring() -> None:
    """What container runtimes do: a seccomp filter under which io_uring_setup (425 everywhere) fails with EPERM."""
    load, jump_if_equal, give_back = 0x20, 0x15, 0x06
    allow, errno = 0x7FFF0000, 0x00050000
    lines = [(load, 0, 0, 0), (jump_if_equal, 0, 1, 425), (give_back, 0, 0, errno | 1), (give_back, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_filter, filter_mode = 38, 22, 2
    for option in ((no_new_privileges, 1, 0), (set_filter, filter_mode, ctypes.addressof(program))):
        if libc.prctl(option[0], ctypes.c_ulong(option[1]), ctypes.c_ulong(option[2]), 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")


def forbid_writes(path: str) -> None:
    """A mount of the path on itself, read-only, in a mount namespace of this process."""
    new_mounts = 0x00020000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(new_mounts):
        raise OSError(ctypes.get_errno(), "unshare")
    for options in (["--make-rprivate", "/"], ["--bind", path, path], ["-o", "remount,bind,ro", path]):
        subprocess.run(["mount", *options], check=True)


def main(without: str, path: str) -> None:
    from banyan._native import SharedBytes, Store

    if without == "io_uring":
        forbid_io_uring()
    elif without == "writes":
        forbid_writes(path)
    try:
        store = Store.open([path], b"n" * 32, LAYER_BYTES, quota_bytes=4 << 20, floor_bytes=0)
    except (OSError, ValueError) as error:
        print(json.dumps({"refused": str(error)}))
        return
    memory = SharedBytes.create(2 * NUM_PAGES * FRAME_BYTES, "arena")
    pages = np.frombuffer(memory, dtype=np.uint8).reshape(2, NUM_PAGES, FRAME_BYTES)
    pages[0] = np.random.default_rng(1).integers(0, 256, pages[0].shape)
    keys = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(NUM_PAGES)]
    offsets = np.arange(2 * NUM_PAGES, dtype=np.int64) * FRAME_BYTES
    store.put(keys, None, memory, offsets[:NUM_PAGES])
    store.sync()
    found = store.lookup(keys)
    failed = store.read(found, found.num_pages, memory, offsets[NUM_PAGES : NUM_PAGES + found.num_pages]).finish()
    same = int((pages[0] == pages[1]).all(axis=1).sum())
    print(
        json.dumps({"engine": store.engine, "num_found": found.num_pages, "num_failed": len(failed), "num_same": same})
    )
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
