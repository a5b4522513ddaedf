# SPDX-License-Identifier: Apache-2.0
"""A node of a cluster: a process with a boot id, a /dev/shm and a mount of its own, and the store that all nodes have.

Page ``n`` has the bytes of frame ``n % 8``; what is read comes into the frames behind.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

NEW_MOUNTS = 0x00020000
BOOT_ID = "/proc/sys/kernel/random/boot_id"
NUM_PAGES = 8


def become_node(boot_id_file: str) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    for words in (
        ["--make-rprivate", "/"],
        ["-t", "tmpfs", "tmpfs", "/dev/shm"],
        ["--bind", boot_id_file, BOOT_ID],
    ):
        subprocess.run(["mount", *words], check=True)


def main(path: str, boot_id_file: str) -> None:
    become_node(boot_id_file)
    from store_rig import LAYER_BYTES, SPACE, filled, frame, keys, offsets

    from banyan._native import store_remove_idle, store_survey
    from banyan.store.backends import native_store, open_store
    from banyan.store.location import StoreLocation

    location = StoreLocation.parse([path])
    store = native_store(open_store(location, namespace=b"n" * 32, layer_bytes=LAYER_BYTES, space=SPACE))
    assert store is not None
    memory = filled()
    print("opened", flush=True)
    for line in sys.stdin:
        what, *words = line.split()
        numbers = [int(word) for word in words]
        frames = [number % NUM_PAGES for number in numbers]
        if what == "put":
            print("put", *store.put(keys(*numbers), None, memory, offsets(*frames)), flush=True)
        elif what == "keep":
            store.put(keys(*numbers), None, memory, offsets(*frames))
            print("kept", len(numbers) - store.sync(), flush=True)
        elif what == "find":
            print("found", store.lookup(keys(*numbers)).num_pages, flush=True)
        elif what == "fetch":
            found = store.lookup(keys(*numbers))
            targets = [NUM_PAGES + one for one in range(found.num_pages)]
            failed = store.read(found, found.num_pages, memory, offsets(*targets)).finish()
            num_same = sum(
                bool((frame(memory, own) == frame(memory, target)).all())
                for own, target in zip(frames, targets, strict=False)
            )
            print("fetched", found.num_pages, num_same, len(failed), flush=True)
        elif what == "evict":
            print("evicted", *store_remove_idle([path])[0], flush=True)
        elif what == "survey":
            print("survey", *(int(shelf["is_in_use"]) for shelf in store_survey([path])["shelves"]), flush=True)
        else:
            print(what, store.stats()[what], flush=True)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
