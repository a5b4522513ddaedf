# SPDX-License-Identifier: Apache-2.0
"""Which weights a folder holds, whatever it is called and whenever it was copied; the same of a LoRA adapter.

A store outlives the server that wrote it: the next one may find other weights under the same path, and must then not
find the old pages. An edit may be as small as one norm of 8 KB, so every byte counts; what has been read once is
remembered. Code that comes with the weights counts as they do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from banyan.layout.file_digests import FileDigests, file_digests, state_name

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIG_SUFFIX = ".json"
"""A model's own, its quantisation's, by whatever name, and which of the files its weights are in."""
WORDS_ALONE = frozenset(
    """added_tokens.json chat_template.json generation_config.json special_tokens_map.json tekken.json tokenizer.json
    tokenizer_config.json vocab.json""".split()
)
"""They decide which tokens there are, and not what is computed of them."""
CODE_SUFFIX = ".py"
"""Of a model that brings its own code (``--trust-remote-code``)."""
ADAPTER_SUFFIXES = (".json", *WEIGHT_SUFFIXES)
_BY_CONTENT = "banyan-adapter-"
"""What ids of content begin with, and what no client may say: SGLang puts the adapter's id behind the ``extra_key`` of
a request, so one that contains an id would be taken for the adapter's."""


@dataclass(frozen=True, slots=True)
class CheckpointDigest:
    """Digest of the weights, their configuration and their code, in hexadecimal; and what it took."""

    sha256: str
    reading: FileDigests


def checkpoint_digest(folder: Path, memory: Path | None) -> CheckpointDigest:
    """Digest of what lies in ``folder``. ``memory``: the file that remembers those of its weights.

    Raises:
        ValueError: when it holds no weights, or is not a folder, or one of them is being written.
        OSError: when a file cannot be read.
    """
    files = sorted(path for path in folder.glob("*") if path.suffix in WEIGHT_SUFFIXES)
    if not files:
        raise ValueError(f"{folder}: no weights ({', '.join(WEIGHT_SUFFIXES)}) to tell this model by")
    digest = hashlib.sha256()
    configs = sorted(path for path in folder.glob(f"*{CONFIG_SUFFIX}") if path.name not in WORDS_ALONE)
    small = configs + sorted(folder.glob(f"*{CODE_SUFFIX}"))
    for path in small:
        if path.is_file():
            _add(digest, path.name, path.read_bytes())
    reading = file_digests(files, memory)
    for path, content in zip(files, reading.digests, strict=True):
        _add(digest, path.name, content)
    return CheckpointDigest(digest.hexdigest(), reading)


def states_of(place: Path) -> dict[str, str]:
    """Of a file, or of those in a folder that its digest, or an adapter's, may be made of: by path, what a file that is
    written anew, or put in its place, does not have.

    Raises:
        OSError: when one cannot be looked at.
    """
    suffixes = (CONFIG_SUFFIX, CODE_SUFFIX, *WEIGHT_SUFFIXES)
    paths = [place] if place.is_file() else [path for path in place.glob("*") if path.suffix in suffixes]
    return {str(path): state_name(path.stat()) for path in paths if path.name not in WORDS_ALONE}


def adapter_id(name: str, folder: Path, modules: Collection[str]) -> str:
    """What requests for the adapter ``name`` in ``folder`` are known by: the same for the same content in any folder.

    Page keys begin with it. Two names are two adapters to SGLang, so the name counts too. ``modules``: to which SGLang
    applies what is in its files.

    Raises:
        ValueError: when the folder holds no weights, or is not a folder.
        OSError: when a file cannot be read.
    """
    files = sorted(path for path in folder.glob("*") if path.suffix in ADAPTER_SUFFIXES)
    if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
        raise ValueError(f"{folder}: no weights ({', '.join(WEIGHT_SUFFIXES)}) to tell this adapter by")
    digest = hashlib.sha256()
    _add(digest, "name", name.encode())
    for module in sorted(modules):
        _add(digest, "module", module.encode())
    for path in files:
        with path.open("rb") as file:
            _add(digest, path.name, hashlib.file_digest(file, "sha256").digest())
    return _BY_CONTENT + digest.hexdigest()


def is_by_content(adapter: str) -> bool:
    """Whether this id of an adapter is one of ``adapter_id``, which means the same to every server."""
    return adapter.startswith(_BY_CONTENT)


def may_name_adapter(extra_key: str, ids: Collection[str] = ()) -> bool:
    """Whether a client's ``extra_key`` could be taken for an adapter: for one of ``ids``, or for one by content, of
    this server or of any other whose pages it may find."""
    return _BY_CONTENT in extra_key or any(adapter in extra_key for adapter in ids)


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    for part in (name.encode(), content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
