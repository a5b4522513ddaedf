# SPDX-License-Identifier: Apache-2.0
"""Which SGLang computes KV. Pages that outlive a server, or leave it, meet others of the same version whose code was
mended: a local fix, a checkout, a vendor's build."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from banyan.config import Config

CODE = ("sglang.kernels", "sglang.srt")
"""All of it: what KV depends on lies in models, layers, kernels, loaders, pools, and whatever these call."""


def engine_name(config: Config) -> str:
    """By which a page is known. 46 MB are read where it is known by its weights, too: once in a server, for all ranks.

    Raises:
        OSError: where the code cannot be read.
    """
    version = f"sglang {importlib.metadata.version('sglang')}"
    return f"{version} {_code_sha256()}" if config.knows_weights else version


def _code_sha256() -> str:
    """The same wherever it is installed."""
    digest = hashlib.sha256()
    for name, path in _sources():
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _sources() -> Iterator[tuple[str, Path]]:
    """In the order of their names."""
    for package in CODE:
        spec = find_spec(package)
        folders = spec.submodule_search_locations if spec is not None else None
        if not folders:
            raise FileNotFoundError(f"{package} is no folder")
        for folder in folders:
            paths = Path(folder).rglob("*.py")
            yield from sorted((f"{package}/{path.relative_to(folder).as_posix()}", path) for path in paths)
