# SPDX-License-Identifier: Apache-2.0
"""``make gpu-bundle``: all that ``make gpu-check`` takes, in one file, for a machine that reaches no package index.

    python test/gpu/bundle.py [FILE]

The file is a shell script with an archive behind it (``unpack.sh``): this repository as git knows it, the native core,
tiny models, and packages that a machine with SGLang may lack. Those are copied from where this program runs; on the
other machine one is used only where its own is missing. SGLang, torch and CUDA are that machine's.
"""

from __future__ import annotations

import importlib.metadata
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNPACK = Path(__file__).with_name("unpack.sh")
NATIVE = Path("python/banyan/_native.abi3.so")
MODELS = Path("build/models/tiny")
PACKED_MODELS = ("wide", "mla-wide", "dsa", "sinks", "state", "mla-wide-mtp")
PACKAGES = ("pytest", "pytest-timeout", "hypothesis", "rich", "shtab")
"""With what they require, as far as that is not SGLang's."""
SGLANGS = frozenset({"sglang", "torch", "triton", "numpy"})
ARCHIVE_MARK = b"__ARCHIVE__\n"
"""The last line of the script."""


def requirement_names(package: str) -> Iterator[str]:
    """What a package always requires: no extras."""
    for line in importlib.metadata.requires(package) or ():
        name, _, condition = line.partition(";")
        if not any(word in condition for word in ("extra", "platform_system", "sys_platform", "python_version")):
            yield re.split(r"[\s<>=!~\[(]", name.strip(), maxsplit=1)[0].lower()


def closure(packages: Iterable[str]) -> list[str]:
    """These packages and what they require, sorted."""
    found: set[str] = set()
    left = list(packages)
    while left:
        name = left.pop()
        if name not in found and name not in SGLANGS:
            found.add(name)
            left += requirement_names(name)
    return sorted(found)


def package_files(package: str) -> Iterator[tuple[Path, str]]:
    """``(file, its name in the archive)`` of all that a package has installed and Python imports."""
    distribution = importlib.metadata.distribution(package)
    for file in distribution.files or ():
        if not file.parts[0].startswith("..") and "__pycache__" not in file.parts:
            yield Path(str(distribution.locate_file(file))), f"site/{package}/{file}"


def repository_files(root: Path) -> Iterator[tuple[Path, str]]:
    """What git tracks, as it lies there, and the native core."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    for name in (*filter(None, listed.split("\0")), str(NATIVE)):
        if (root / name).is_file():
            yield root / name, name


def model_files(root: Path, names: Iterable[str]) -> Iterator[tuple[Path, str]]:
    """Of models that were made here."""
    for name in names:
        for path in sorted((root / MODELS / name).rglob("*")):
            if path.is_file():
                yield path, str(MODELS / name / path.relative_to(root / MODELS / name))


def pack(target: Path, files: Iterable[tuple[Path, str]], *, known_as: str) -> int:
    """Write the bundle; how many bytes it has. ``known_as``: the commit that results are noted under."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for path, name in files:
            archive.add(path.resolve(), arcname=name, recursive=False)
        label = tarfile.TarInfo("COMMIT")
        label.size = len(known_as.encode())
        archive.addfile(label, io.BytesIO(known_as.encode()))
    head = UNPACK.read_bytes()
    if not head.endswith(ARCHIVE_MARK):
        raise ValueError(f"{UNPACK} does not end with {ARCHIVE_MARK!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(head + written.getvalue())
    target.chmod(0o755)
    return target.stat().st_size


def main(words: list[str]) -> int:
    # It lies beside this file, and is found where this file is the program.
    from check import commit

    from benchmark.modes import models

    target = Path(words[0]) if words else ROOT / "build/banyan-gpu-bundle.sh"
    if not (ROOT / NATIVE).exists():
        raise SystemExit(f"gpu-bundle: no {NATIVE}: make setup")
    for shape in (*models.SHAPES, models.WIDE):
        if shape.name in PACKED_MODELS:
            models.ensure(shape, ROOT / MODELS)
    packages = closure(PACKAGES)
    files = [*repository_files(ROOT), *model_files(ROOT, PACKED_MODELS)]
    for package in packages:
        files += package_files(package)
    num_bytes = pack(target, files, known_as=commit())
    print(f"[gpu-bundle] {target}: {num_bytes / 1e6:.1f} MB, {commit()}, with {', '.join(packages)}")
    print(f"[gpu-bundle] on the machine with the GPU: bash {target.name} first")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
