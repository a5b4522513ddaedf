# SPDX-License-Identifier: Apache-2.0
"""``banyan doctor``: what works on this machine, said before a server is started."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from banyan import SGLANG_VERSION, __version__, _native, config, patches
from banyan.cli.doctor_drive import examine_drive, examine_store_drive
from banyan.cli.doctor_gpu import examine_gpus
from banyan.cli.doctor_limits import examine_limits
from banyan.cli.doctor_machine import Kernel, examine_machine
from banyan.cli.doctor_peer import examine_path
from banyan.cli.doctor_processor import examine_processor
from banyan.cli.doctor_sglang import examine_flags
from banyan.cli.finding import Finding
from banyan.core import Address
from banyan.feature_list import switched_off
from banyan.owner import read_secret
from banyan.refusals import is_release
from banyan.store.backends import look
from banyan.store.location import StoreLocation
from banyan.transport.cuda_ipc.driver import CudaDriver


def examine(
    *, drives: Sequence[Path] = (), store: Sequence[str] = (), launch: Sequence[str] | None = None
) -> list[Finding]:
    """Every finding, in the order in which a server would meet them. Starts nothing and changes nothing.

    ``drives``: folders to measure; ``store``: one as ``--banyan-store`` names it; ``launch``: the arguments of a
    server, None for no dry run.
    """
    checks: tuple[Callable[[], Finding], ...] = (
        _versions,
        _wheel,
        _seams,
        _entry_point,
        _native_core,
        _shared_memory,
        _huge_pages,
        _kept_arena,
        _sgl_kernel,
        _cpu_engine,
    )
    kernel = Kernel()
    found = [check() for check in checks] + examine_processor()
    found += examine_machine(kernel) + examine_limits(kernel) + examine_gpus(CudaDriver)
    if launch is not None:
        about_flags, named = examine_flags(launch)
        found, store = found + about_flags, store or named
    found += [finding for folder in drives for finding in examine_drive(folder, kernel)]
    return found + _named_store(store, kernel) if store else found


def _named_store(parts: Sequence[str], kernel: Kernel) -> list[Finding]:
    """Of a store and, where it is not refused, of its drives."""
    try:
        location = StoreLocation.parse(parts)
    except ValueError as error:
        return [Finding("store", False, str(error), "see --banyan-store in docs/operations.md")]
    found = examine_store(location)
    if not all(finding.is_ok for finding in found):
        return found
    return found + [finding for path in location.paths for finding in examine_store_drive(Path(path), kernel)]


def examine_store(location: StoreLocation) -> list[Finding]:
    """Whether its library is there and whoever is to answer does; of plain files, what they would be refused for."""
    what = f"store on {location}"
    try:
        said = look(location)
    except (ValueError, OSError) as error:
        return [Finding.refused(what, str(error))]
    return [Finding(what, True, said)] if said else []


def examine_peers(addresses: Sequence[str], secret_file: Path | None) -> list[Finding]:
    """The paths to other nodes, tried one after the other.

    Raises:
        ValueError: for what is no address, or no secret.
        OSError: when the secret cannot be read.
    """
    from banyan.features.nodes.path import try_path
    from banyan.transport.sealed.secret import Keys

    nodes = [Address.parse(address) for address in addresses]
    if secret_file is None:
        raise ValueError("--peer: a node lets in who knows its secret: name the file with --secret-file")
    keys = Keys.of(read_secret(secret_file))
    return [finding for node in nodes for finding in examine_path(try_path(node, keys))]


def _versions() -> Finding:
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return Finding("sglang", False, "not installed", f"pip install sglang=={SGLANG_VERSION}")
    return Finding(
        "sglang",
        is_release(found),
        f"{found} (banyan {__version__}, Python {sys.version.split()[0]})",
        f"this release of Banyan works on sglang=={SGLANG_VERSION} only",
    )


def _wheel() -> Finding:
    """Whether all of it is there. Of a checkout, or of a folder on the path, nobody has written down what there is."""
    try:
        listed = importlib.metadata.files("banyan") or ()
    except importlib.metadata.PackageNotFoundError:
        listed = ()
    # What Python has compiled it compiles again, and what lies beside the package may have been left out.
    files = [file for file in listed if file.parts[0] == "banyan" and file.suffix != ".pyc"]
    gone = [str(file) for file in files if not Path(str(file.locate())).exists()]
    detail = f"{len(gone)} of {len(files)} files are gone: {', '.join(gone[:3])}" if gone else f"{len(files)} files"
    return Finding("files of the wheel", not gone, detail, "install Banyan's wheel anew")


def _seams() -> Finding:
    try:
        queue = patches.load_queue()
    except ValueError as error:
        return Finding.refused("patch queue", str(error))
    off = switched_off(patches.changed(queue))
    detail = "; ".join(one.line for one in off) or f"{len(queue)} patches match the installed source"
    return Finding("patch queue", not off, detail, "; ".join(dict.fromkeys(one.way_out for one in off)))


def _entry_point() -> Finding:
    names = [entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")]
    allowed = config.allowed_plugins()
    is_ok = "banyan" in names and (allowed is None or "banyan" in allowed)
    detail = f"plugins {names}" + ("" if allowed is None else f", SGLANG_PLUGINS allows {allowed}")
    return Finding(
        "entry point",
        is_ok,
        detail,
        "install Banyan's wheel (build/dist of `make wheel`) into SGLang's environment; allow it in SGLANG_PLUGINS",
    )


def shared_memory_huge_pages() -> str:
    """Whether shared memory gets huge pages on this machine, in the kernel's word: always, advise, never, ..."""
    try:
        choices = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return "not offered"
    return choices.partition("[")[2].partition("]")[0]


def _huge_pages() -> Finding:
    setting = shared_memory_huge_pages()
    hint = ""
    if setting not in ("always", "within_size", "advise", "force"):
        hint = (
            "pages lie scattered in 4 KiB pieces, which drives and processors reach more slowly: "
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled before the server starts"
        )
    return Finding("huge pages for shared memory", True, setting, hint=hint)


def _kept_arena() -> Finding:
    folder = Path(config.KEEP_FOLDER)
    held_bytes = 0
    for path in folder.glob("*/*"):
        # A server that starts or ends takes them away.
        with contextlib.suppress(OSError):
            # Blocks of 512 bytes, whatever the file system.
            held_bytes += path.lstat().st_blocks * 512
    hint = "they stay when no server runs: remove the folder to have them back" if held_bytes else ""
    return Finding("kept host arena", True, f"{held_bytes / config.GIB:.2f} GiB in {folder}", hint=hint)


def _native_core() -> Finding:
    # No command begins where it does not load.
    return Finding("native core", True, _native.__name__)


def _shared_memory() -> Finding:
    num_bytes = 1 << 20
    try:
        created = _native.RankTable.create(1)
        rank_table = _native.RankTable.open(created.path)
        shared = _native.SharedBytes.create(num_bytes, "doctor")
    except OSError as error:
        return Finding("shared memory", False, str(error), "memfd_create and /proc/<pid>/fd must be allowed")
    detail = f"memfd of {shared.num_bytes} bytes, rank table of {rank_table.num_slots} slot"
    return Finding("shared memory", True, detail)


def _sgl_kernel() -> Finding:
    if importlib.util.find_spec("sgl_kernel") is None:
        return Finding("sgl_kernel", False, "not installed", "make setup installs a stand-in where there is no GPU")
    try:
        version = importlib.metadata.version("banyan-sgl-kernel-cpu")
    except importlib.metadata.PackageNotFoundError:
        return Finding("sgl_kernel", True, "SGLang's own (GPU)")
    return Finding("sgl_kernel", True, f"CPU stand-in {version}")


def _cpu_engine() -> Finding:
    try:
        version = importlib.metadata.version("banyan-cpu-engine")
    except importlib.metadata.PackageNotFoundError:
        hint = "for servers with --device cpu install banyan-cpu-engine: SGLang's own attention is slow behind a prefix"
        return Finding("CPU engine", True, "not installed; a GPU needs none", hint=hint)
    return Finding("CPU engine", True, f"banyan-cpu-engine {version}")
