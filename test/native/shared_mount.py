# SPDX-License-Identifier: Apache-2.0
"""A folder as the nodes of a cluster mount it: by FUSE, whose locks reach no further than one mount. One process serves
one mount; the kernel's side is the real one, with its caches and its locks.

It speaks what the store needs of the protocol (linux/fuse.h); an inode is an ``O_PATH`` descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass

BUFFER_BYTES = (1 << 20) + 4096
WRITE_BYTES = 128 << 10
KEPT_S = 1
"""For so long the kernel believes what it has heard of names and attributes."""

ROOT = 1
MODE, SIZE, TIME, TIME_NOW = 1 << 0, 1 << 3, 1 << 5, 1 << 8
"""What SETATTR sets."""
QUIET = (2, 42)
"""Operations that are not answered: FORGET, BATCH_FORGET."""

Answer = Callable[[int, bytes], bytes]


@dataclass
class Inode:
    fd: int
    num_lookups: int = 0

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.fd}"


def attributes(found: os.stat_result) -> bytes:
    times = [divmod(time_ns, 10**9) for time_ns in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
    return struct.pack(
        "<6Q10I",
        found.st_ino,
        found.st_size,
        found.st_blocks,
        *(seconds for seconds, _ in times),
        *(rest for _, rest in times),
        found.st_mode,
        found.st_nlink,
        found.st_uid,
        found.st_gid,
        found.st_rdev,
        found.st_blksize,
        0,
    )


class Mount:
    """Answers the kernel for ``folder``."""

    def __init__(self, folder: str) -> None:
        self._inodes = {ROOT: Inode(os.open(folder, os.O_PATH), 1)}
        self._handles: dict[int, list[tuple[int, int, bytes]]] = {}
        self._answers: dict[int, Answer] = {
            1: self.lookup,
            2: self.forget,
            3: self.getattr,
            4: self.setattr,
            9: self.mkdir,
            10: self.unlink,
            11: self.rmdir,
            12: self.rename,
            14: self.open,
            15: self.read,
            16: self.write,
            17: self.statfs,
            18: self.release,
            20: self.fsync,
            26: self.init,
            27: self.opendir,
            28: self.readdir,
            29: self.releasedir,
            35: self.create,
            42: self.forget_all,
        }

    def serve(self, device: int) -> None:
        """Until it is unmounted."""
        while True:
            try:
                message = os.read(device, BUFFER_BYTES)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            operation, unique, node = struct.unpack_from("<4xIQQ", message)
            failed, answer = 0, b""
            try:
                handler = self._answers.get(operation)
                if handler is None:
                    failed = errno.ENOSYS
                else:
                    answer = handler(node, message[40:])
            except OSError as error:
                failed = error.errno or errno.EIO
            if operation not in QUIET:
                # Whoever has given up waiting is not there any more.
                with contextlib.suppress(FileNotFoundError):
                    os.write(device, struct.pack("<IiQ", 16 + len(answer), -failed, unique) + answer)

    # ---- names -------------------------------------------------------------------------------------------------

    def _entry(self, node: int, name: bytes) -> bytes:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._inodes[node].fd)
        found = os.fstat(fd)
        inode = self._inodes.setdefault(found.st_ino, Inode(fd))
        inode.num_lookups += 1
        if inode.fd != fd:
            os.close(fd)
        return struct.pack("<4QII", found.st_ino, 0, KEPT_S, KEPT_S, 0, 0) + attributes(found)

    def lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(node, body[:-1])

    def _forget(self, node: int, num_lookups: int) -> None:
        inode = self._inodes[node]
        inode.num_lookups -= num_lookups
        if inode.num_lookups <= 0 and node != ROOT:
            os.close(self._inodes.pop(node).fd)

    def forget(self, node: int, body: bytes) -> bytes:
        self._forget(node, *struct.unpack_from("<Q", body))
        return b""

    def forget_all(self, _: int, body: bytes) -> bytes:
        for one in range(*struct.unpack_from("<I", body)):
            self._forget(*struct.unpack_from("<QQ", body, 8 + 16 * one))
        return b""

    def mkdir(self, node: int, body: bytes) -> bytes:
        os.mkdir(body[8:-1], struct.unpack_from("<I", body)[0], dir_fd=self._inodes[node].fd)
        return self._entry(node, body[8:-1])

    def unlink(self, node: int, body: bytes) -> bytes:
        os.unlink(body[:-1], dir_fd=self._inodes[node].fd)
        return b""

    def rmdir(self, node: int, body: bytes) -> bytes:
        os.rmdir(body[:-1], dir_fd=self._inodes[node].fd)
        return b""

    def rename(self, node: int, body: bytes) -> bytes:
        (target,) = struct.unpack_from("<Q", body)
        old, new = body[8:-1].split(b"\0")
        os.rename(old, new, src_dir_fd=self._inodes[node].fd, dst_dir_fd=self._inodes[target].fd)
        return b""

    # ---- attributes --------------------------------------------------------------------------------------------

    def getattr(self, node: int, _: bytes) -> bytes:
        return struct.pack("<QII", KEPT_S, 0, 0) + attributes(os.fstat(self._inodes[node].fd))

    def setattr(self, node: int, body: bytes) -> bytes:
        wanted, size, time_s, time_ns, mode = struct.unpack_from("<I12xQ16xQ12xI4xI", body)
        path = self._inodes[node].path
        if wanted & SIZE:
            os.truncate(path, size)
        if wanted & MODE:
            os.chmod(path, stat.S_IMODE(mode))
        if wanted & TIME_NOW:
            os.utime(path)
        elif wanted & TIME:
            os.utime(path, ns=(time_s * 10**9 + time_ns,) * 2)
        return self.getattr(node, b"")

    def statfs(self, node: int, _: bytes) -> bytes:
        found = os.statvfs(self._inodes[node].path)
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q4I24x", *counts, found.f_bsize, found.f_namemax, found.f_frsize, 0)

    # ---- files -------------------------------------------------------------------------------------------------

    def open(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        fd = os.open(self._inodes[node].path, flags & ~(os.O_NOFOLLOW | os.O_DIRECT | os.O_CREAT | os.O_EXCL))
        return struct.pack("<QII", fd, 0, 0)

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        fd = os.open(body[16:-1], (flags | os.O_CREAT) & ~os.O_DIRECT, mode, dir_fd=self._inodes[node].fd)
        return self._entry(node, body[16:-1]) + struct.pack("<QII", fd, 0, 0)

    def read(self, _: int, body: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(fd, size, offset)

    def write(self, _: int, body: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(fd, body[40 : 40 + size], offset), 0)

    def release(self, _: int, body: bytes) -> bytes:
        os.close(*struct.unpack_from("<Q", body))
        return b""

    def fsync(self, _: int, body: bytes) -> bytes:
        os.fsync(*struct.unpack_from("<Q", body))
        return b""

    def opendir(self, node: int, _: bytes) -> bytes:
        fd = os.open(self._inodes[node].path, os.O_RDONLY | os.O_DIRECTORY)
        with os.scandir(fd) as entries:
            kinds = {True: stat.S_IFDIR >> 12, False: stat.S_IFREG >> 12}
            self._handles[fd] = [(one.inode(), kinds[one.is_dir()], os.fsencode(one.name)) for one in entries]
        return struct.pack("<QII", fd, 0, 0)

    def readdir(self, _: int, body: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<QQI", body)
        said = b""
        for number, (inode, kind, name) in enumerate(self._handles[fd][offset:], start=offset + 1):
            one = struct.pack("<QQII", inode, number, len(name), kind) + name
            one += b"\0" * (-len(one) % 8)
            if len(said) + len(one) > size:
                break
            said += one
        return said

    def releasedir(self, node: int, body: bytes) -> bytes:
        self._handles.pop(*struct.unpack_from("<Q", body))
        return self.release(node, body)

    def init(self, _: int, body: bytes) -> bytes:
        _, _, read_ahead = struct.unpack_from("<III", body)
        # No flags: neither locks nor anything else goes beyond the kernel.
        return struct.pack("<IIIIHHIIHHI28x", 7, 31, read_ahead, 0, 16, 12, WRITE_BYTES, 1, 0, 0, 0)


def main(folder: str, point: str) -> None:
    """Mounts ``folder`` at ``point``, says so, and serves it until it is unmounted."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"banyan-test", point.encode(), b"fuse.banyan-test", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    print("mounted", flush=True)
    Mount(folder).serve(device)


if __name__ == "__main__":
    main(*sys.argv[1:])
