# SPDX-License-Identifier: Apache-2.0
"""The name of an SGLang whose code somebody has changed is another one, wherever it lies."""

import importlib.metadata
import shutil
from types import SimpleNamespace

import pytest

from banyan.config import Config
from banyan.sglang_plugin.launcher import engine_code

STORING = Config(store=("/kv",))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An SGLang of a few files, that is found where it was put last."""
    for name in ("srt/models/llama.py", "srt/layers/rotary.py", "kernels/ops/rope.py"):
        path = tmp_path / "first" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")

    def put(folder):
        def find(package):
            return SimpleNamespace(submodule_search_locations=[str(folder / package.rpartition(".")[2])])

        monkeypatch.setattr(engine_code, "find_spec", find)

    return put, tmp_path / "first"


def test_name_when_the_same_code_lies_elsewhere_and_was_run_then_it_is_the_same(installed, tmp_path):
    put, first = installed
    put(first)
    name = engine_code.engine_name(STORING)
    shutil.copytree(first, tmp_path / "second")
    (tmp_path / "second" / "srt" / "__pycache__").mkdir()
    (tmp_path / "second" / "srt" / "__pycache__" / "llama.cpython-311.pyc").write_bytes(b"compiled")
    put(tmp_path / "second")
    assert engine_code.engine_name(STORING) == name
    assert name.startswith(f"sglang {importlib.metadata.version('sglang')} ")


@pytest.mark.parametrize("name", ["srt/layers/rotary.py", "kernels/ops/rope.py", "srt/new.py"])
def test_name_when_a_file_of_it_is_another_one_then_so_is_it_for_pages_that_others_may_meet(installed, name):
    put, folder = installed
    put(folder)
    before, alone = engine_code.engine_name(STORING), engine_code.engine_name(Config())
    (folder / name).write_text("# mended\n")
    assert engine_code.engine_name(STORING) != before
    assert engine_code.engine_name(Config()) == alone


def test_name_when_two_files_divide_the_same_text_otherwise_then_it_is_another_one(installed):
    put, folder = installed
    put(folder)
    before = engine_code.engine_name(STORING)
    first, second = folder / "srt/models/llama.py", folder / "srt/layers/rotary.py"
    texts = first.read_text(), second.read_text()
    first.write_text("".join(texts))
    second.write_text("")
    assert engine_code.engine_name(STORING) != before


def test_name_when_there_is_no_code_to_read_then_none_is_given(monkeypatch):
    monkeypatch.setattr(engine_code, "find_spec", lambda package: SimpleNamespace(submodule_search_locations=None))
    with pytest.raises(FileNotFoundError):
        engine_code.engine_name(STORING)
