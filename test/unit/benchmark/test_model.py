# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from benchmark import model
from benchmark.model import MARKER_FILE, ModelUnavailable, ensure_model, is_current


@pytest.fixture
def fake_conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Conversions write one small file; the list says where."""
    folders: list[Path] = []
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"gguf")

    def convert(source: Path, folder: Path) -> int:
        folders.append(folder)
        (folder / "model.safetensors").write_bytes(b"weights")
        return 7

    monkeypatch.setattr(model, "convert", convert)
    monkeypatch.setattr(model, "find_gguf", lambda: gguf)
    return folders


def test_ensure_when_called_twice_then_converted_once(fake_conversion: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "models" / "small"
    assert ensure_model(target) == ensure_model(target) == target
    assert len(fake_conversion) == 1
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert sorted(path.name for path in target.parent.iterdir()) == ["small"]


@pytest.mark.parametrize("marker", ["", "[]", json.dumps({"conversion": 0})])
def test_ensure_when_the_marker_is_of_another_conversion_then_made_anew(
    fake_conversion: list[Path], tmp_path: Path, marker: str
) -> None:
    target = tmp_path / "small"
    target.mkdir()
    (target / MARKER_FILE).write_text(marker)
    (target / "old").write_text("left over")
    assert not is_current(target)
    ensure_model(target)
    assert is_current(target) and not (target / "old").exists()


def test_ensure_when_the_conversion_fails_then_nothing_is_left(
    fake_conversion: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, folder: Path) -> int:
        raise ModelUnavailable("no chat template")

    monkeypatch.setattr(model, "convert", fail)
    with pytest.raises(ModelUnavailable):
        ensure_model(tmp_path / "models" / "small")
    assert list((tmp_path / "models").iterdir()) == []


def test_main_when_the_package_is_missing_then_one_line_and_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model, "GGUF_MODULE", "no_such_module")
    assert model.main(["--target", str(tmp_path / "x")]) == 1
    assert "make setup" in capsys.readouterr().err
