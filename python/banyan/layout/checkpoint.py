# SPDX-License-Identifier: Apache-2.0
"""Which weights a folder holds, whatever it is called and whenever it was copied; the same of a LoRA adapter.

A store outlives the server that wrote it: the next one may find other weights under the same path, and must then not
find the old pages. Reading all weights would cost a minute for each hundred GiB, so each file is sampled: fine-tuning
or merging changes some values nearly everywhere. If it changed one byte in ten, 256 samples of 4 KiB would all miss it
once in 10^11 times. Adapters are small, and read whole.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIG_NAMES = ("config.json", "hf_quant_config.json", "quantize_config.json")
NUM_SAMPLES = 256
SAMPLE_BYTES = 4096
ADAPTER_SUFFIXES = (".json", *WEIGHT_SUFFIXES)
_BY_CONTENT = "content-"


def checkpoint_digest(folder: Path) -> str:
    """Digest of the weights and their configuration in ``folder``.

    Raises:
        ValueError: when it holds no weights, or is not a folder.
        OSError: when a file cannot be read.
    """
    files = sorted(path for path in folder.glob("*") if path.suffix in WEIGHT_SUFFIXES)
    if not files:
        raise ValueError(f"{folder}: no weights ({', '.join(WEIGHT_SUFFIXES)}) to tell this model by")
    digest = hashlib.sha256()
    for name in CONFIG_NAMES:
        path = folder / name
        if path.is_file():
            _add(digest, name, path.read_bytes())
    for path in files:
        _add(digest, path.name, _sampled(path))
    return digest.hexdigest()


def adapter_id(name: str, folder: Path) -> str:
    """What requests for the adapter ``name`` in ``folder`` are known by: the same for the same content in any folder.

    Page keys begin with it. Two names are two adapters to SGLang, so the name counts too.

    Raises:
        ValueError: when the folder holds no weights, or is not a folder.
        OSError: when a file cannot be read.
    """
    files = sorted(path for path in folder.glob("*") if path.suffix in ADAPTER_SUFFIXES)
    if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
        raise ValueError(f"{folder}: no weights ({', '.join(WEIGHT_SUFFIXES)}) to tell this adapter by")
    digest = hashlib.sha256()
    _add(digest, "name", name.encode())
    for path in files:
        with path.open("rb") as file:
            _add(digest, path.name, hashlib.file_digest(file, "sha256").digest())
    return _BY_CONTENT + digest.hexdigest()


def is_by_content(adapter: str) -> bool:
    """Whether this id of an adapter is one of ``adapter_id``, which means the same to every server."""
    return adapter.startswith(_BY_CONTENT)


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    sample = hashlib.sha256(size.to_bytes(8, "little"))
    last = max(0, size - SAMPLE_BYTES)
    with path.open("rb", buffering=0) as file:
        for number in range(NUM_SAMPLES):
            file.seek(last * number // (NUM_SAMPLES - 1))
            sample.update(file.read(SAMPLE_BYTES))
    return sample.digest()


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    for part in (name.encode(), content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
