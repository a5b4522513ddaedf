# SPDX-License-Identifier: Apache-2.0
"""What was put in the place of a model's files since they were noted is seen."""

import os

import pytest

from banyan.sglang_plugin import model_files

NAMES = ("config.json", "model-1.safetensors", "modeling_own.py")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    for name in NAMES:
        (made / name).write_text("as it was")
    return made


def put_in_place(path, text="another"):
    """With the size and the time of what was there, as a tool that copies may leave them."""
    was, other = path.stat(), path.with_name("other")
    other.write_text(text[: was.st_size].ljust(was.st_size))
    os.utime(other, ns=(was.st_atime_ns, was.st_mtime_ns))
    other.replace(path)


def test_files_when_nobody_touches_them_or_their_words_alone_then_they_have_not_changed(folder):
    noted = [model_files.note(str(folder)), model_files.note(str(folder / "config.json"))]
    (folder / "tokenizer.json").write_text("words")
    assert model_files.changed(noted) is None


@pytest.mark.parametrize("name", NAMES)
def test_files_when_one_is_replaced_or_gone_then_it_is_named(folder, name):
    noted = [model_files.note(str(folder))]
    put_in_place(folder / name)
    assert model_files.changed(noted) == str(folder / name)
    noted = [model_files.note(str(folder)), model_files.note(str(folder / name))]
    (folder / name).unlink()
    assert model_files.changed(noted[:1]) == model_files.changed(noted[1:]) == str(folder / name)


def test_files_when_one_comes_to_a_folder_then_it_is_named(folder):
    noted = [model_files.note(str(folder))]
    (folder / "model-2.safetensors").write_text("new")
    assert model_files.changed(noted) == str(folder / "model-2.safetensors")


def test_files_when_they_come_from_a_hub_while_they_are_loaded_then_only_what_was_there_must_stay(folder, monkeypatch):
    def snapshot(name, *, revision, local_files_only):
        assert (name, revision, local_files_only) == ("a/model", "main", True)
        return str(folder)

    before = model_files.note("a/model/that/is/no/name", "main")
    assert before[2] == {}
    monkeypatch.setattr(model_files, "snapshot_download", snapshot)
    noted = [before, model_files.note("a/model", "main")]
    noted[0] = ("a/model", "main", {})
    (folder / "model-2.safetensors").write_text("new")
    assert model_files.changed(noted) is None
    put_in_place(folder / NAMES[0])
    assert model_files.changed(noted) == str(folder / NAMES[0])
