# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from banyan.layout.checkpoint import adapter_id, is_by_content, may_name_adapter
from banyan.layout.checkpoint import checkpoint_digest as digest_of


def checkpoint_digest(folder: Path) -> str:
    return digest_of(folder, None).sha256


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


def test_digest_when_one_byte_anywhere_differs_then_different(folder: Path) -> None:
    told = {checkpoint_digest(folder)}
    path = folder / "model-1.safetensors"
    weights = path.read_bytes()
    for place in (0, 5000, 123_457, len(weights) - 1):
        path.write_bytes(weights[:place] + bytes([weights[place] ^ 1]) + weights[place + 1 :])
        told.add(checkpoint_digest(folder))
    assert len(told) == 5


def test_digest_when_the_code_of_the_model_differs_then_different(folder: Path) -> None:
    told = {checkpoint_digest(folder)}
    for code in ("scale = 1.0", "scale = 2.0"):
        (folder / "modeling_own.py").write_text(code)
        told.add(checkpoint_digest(folder))
    assert len(told) == 3


@pytest.mark.parametrize("name", ["config.json", "model-2.safetensors"])
def test_digest_when_a_small_file_differs_then_different(folder: Path, name: str) -> None:
    before = checkpoint_digest(folder)
    (folder / name).write_bytes((folder / name).read_bytes() + b" ")
    assert checkpoint_digest(folder) != before


@pytest.mark.parametrize("name", ["params.json", "quant_config.json", "model.safetensors.index.json"])
def test_digest_when_a_configuration_of_any_name_differs_then_different(folder: Path, name: str) -> None:
    told = {checkpoint_digest(folder)}
    for text in ("{}", '{"bits": 4}'):
        (folder / name).write_text(text)
        told.add(checkpoint_digest(folder))
    assert len(told) == 3


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_digest_when_only_words_differ_then_equal(folder: Path, name: str) -> None:
    before = checkpoint_digest(folder)
    (folder / name).write_text("{}")
    assert checkpoint_digest(folder) == before


def test_digest_when_a_file_is_missing_then_different(folder: Path) -> None:
    before = checkpoint_digest(folder)
    (folder / "model-2.safetensors").unlink()
    assert checkpoint_digest(folder) != before


def test_digest_when_there_are_no_weights_then_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no weights"):
        digest_of(tmp_path, None)


MODULES = ["q_proj", "v_proj"]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(range(256)))
    return tmp_path


def test_adapter_when_its_folder_is_copied_then_it_is_the_same(adapter: Path, tmp_path_factory) -> None:
    other = tmp_path_factory.mktemp("copy")
    for path in adapter.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    told = adapter_id("a", adapter, MODULES)
    assert adapter_id("a", other, MODULES) == told and is_by_content(told)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapter_when_one_byte_of_a_file_differs_then_it_is_another(adapter: Path, name: str) -> None:
    before = adapter_id("a", adapter, MODULES)
    content = bytearray((adapter / name).read_bytes())
    content[-1] ^= 1
    (adapter / name).write_bytes(content)
    assert adapter_id("a", adapter, MODULES) != before


def test_adapter_when_it_has_another_name_then_it_is_another(adapter: Path) -> None:
    assert adapter_id("a", adapter, MODULES) != adapter_id("b", adapter, MODULES)


def test_adapter_when_it_is_applied_to_other_modules_then_it_is_another(adapter: Path) -> None:
    told = adapter_id("a", adapter, MODULES)
    assert adapter_id("a", adapter, MODULES[::-1]) == told
    assert adapter_id("a", adapter, MODULES[:1]) != told != adapter_id("a", adapter, [*MODULES, "o_proj"])


def test_adapter_when_there_are_no_weights_then_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="no weights"):
        adapter_id("a", tmp_path, MODULES)


def test_adapter_when_sglang_made_its_id_then_it_is_not_by_content() -> None:
    assert not is_by_content("0f" * 16)


@pytest.mark.parametrize("around", [("", ""), ("tenant 7 ", ""), ("", "|more")])
def test_extra_key_when_it_holds_the_id_of_an_adapter_then_it_may_name_it(
    adapter: Path, around: tuple[str, str]
) -> None:
    before, behind = around
    assert may_name_adapter(before + adapter_id("a", adapter, MODULES) + behind)
    assert may_name_adapter(before + "0f" * 16 + behind, ["a1" * 16, "0f" * 16])
    assert not may_name_adapter(before + "content-" + "a" * 64 + behind, ["a1" * 16])
