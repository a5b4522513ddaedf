# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from banyan.layout.checkpoint import checkpoint_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "model-1.safetensors").write_bytes(bytes(range(256)) * 4096)
    (tmp_path / "model-2.safetensors").write_bytes(b"small")
    return tmp_path


def test_digest_when_the_folder_is_copied_then_equal(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("copy")
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    assert checkpoint_digest(other) == checkpoint_digest(folder)


def test_digest_when_some_weights_everywhere_differ_then_different(folder: Path) -> None:
    before = checkpoint_digest(folder)
    weights = bytearray((folder / "model-1.safetensors").read_bytes())
    weights[::50] = bytes(len(weights[::50]))
    (folder / "model-1.safetensors").write_bytes(weights)
    assert checkpoint_digest(folder) != before


@pytest.mark.parametrize("name", ["config.json", "model-2.safetensors"])
def test_digest_when_a_small_file_differs_then_different(folder: Path, name: str) -> None:
    before = checkpoint_digest(folder)
    (folder / name).write_bytes((folder / name).read_bytes() + b" ")
    assert checkpoint_digest(folder) != before


def test_digest_when_a_file_is_missing_then_different(folder: Path) -> None:
    before = checkpoint_digest(folder)
    (folder / "model-2.safetensors").unlink()
    assert checkpoint_digest(folder) != before


def test_digest_when_there_are_no_weights_then_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no weights"):
        checkpoint_digest(tmp_path)
