# SPDX-License-Identifier: Apache-2.0
"""The patch queue against the SGLang that is installed. Nothing of SGLang is imported here."""

import ast
import functools
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from banyan import feature_list as features
from banyan import patches
from banyan.patches import source

QUEUE = patches.load_queue()


def fingerprint(text, watches="body"):
    return source.fingerprint(ast.parse(text).body[0] if watches == "signature" else ast.parse(text), watches)


@pytest.mark.parametrize("patch", QUEUE, ids=lambda patch: patch.name)
def test_patch_when_sglang_is_the_pinned_one_then_its_fingerprint_matches(patch):
    assert patches.changed([patch]) == []


@pytest.mark.parametrize("patch", QUEUE, ids=lambda patch: patch.name)
def test_patch_when_read_then_it_says_why_and_until_when(patch):
    assert len(patch.why) > 20 and len(patch.remove_when) > 10
    assert set(patch.processes) <= {"main", "controller", "scheduler"}


def test_fingerprint_when_only_comments_and_layout_change_then_equal():
    one = "def f(a):\n    # why\n    return a + 1\n"
    two = "def f(a):\n\n  return a + 1  # other\n"
    assert fingerprint(one) == fingerprint(two)
    assert fingerprint(one) != fingerprint(one.replace("1", "2"))


def test_fingerprint_when_python_splits_the_source_in_another_way_then_equal():
    # Python 3.12 makes many tokens of an f-string and may leave empty parts in it, 3.11 has one token and no such part.
    source = 'def f(x, *, y: int = 1) -> str:\n    """What."""\n    return f"{x!r:>{y}} {x:.2f}" "and"\n'
    assert fingerprint(source) == "df6ee138715bf29c"
    assert fingerprint(ast.unparse(ast.parse(source))) == fingerprint(source)
    assert fingerprint(source.replace(".2f", ".3f")) != fingerprint(source)


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ("def f(self, a: str, *, b=2):\n    return a\n", True),
        ("@trace\ndef f(self, a, *, b=None): ...\n", True),
        ("def f(self, c, *, b=1): ...\n", False),
        ("def f(self, a, *, b): ...\n", False),
        ("def f(self, a=0, *, b=1): ...\n", False),
        ("def f(self, a, d, *, b=1): ...\n", False),
        ("def f(self, a, *, b=1, **more): ...\n", False),
        ("async def f(self, a, *, b=1): ...\n", False),
        ("@property\ndef f(self, a, *, b=1): ...\n", False),
    ],
)
def test_signature_when_what_a_caller_sees_changes_then_another_and_else_the_same(other, is_same):
    one = "def f(self, a, *, b=1):\n    return a + b\n"
    assert (fingerprint(one, "signature") == fingerprint(other, "signature")) is is_same


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ("class A:\n    'said'\n    x: str\n    def f(self):\n        return 2\n", True),
        ("class A:\n    x: int\n    y: int\n    def f(self): ...\n", False),
        ("class A:\n    x: int\n    def f(self, a): ...\n", False),
        ("class A:\n    x: int\n    @abstractmethod\n    def f(self): ...\n", False),
        ("class A:\n    x: int\n", False),
    ],
)
def test_signature_when_fields_or_methods_of_a_class_change_then_another(other, is_same):
    one = "class A:\n    x: int\n    def f(self):\n        return 1\n"
    assert (fingerprint(one, "signature") == fingerprint(other, "signature")) is is_same


def test_queue_when_its_folders_are_compared_with_the_features_then_each_has_both():
    assert {patch.feature for patch in QUEUE} <= {feature.name for feature in features.FEATURES}


def test_queue_when_it_is_counted_then_the_core_stays_small():
    assert patches.NUM_PATCHES <= 75 and sum(patch.feature == features.CORE for patch in QUEUE) <= 15


def test_load_queue_when_one_file_is_not_there_then_nothing_goes_on_without_it(monkeypatch, tmp_path):
    shutil.copytree(Path(patches.__file__).parent, tmp_path / "patches")
    monkeypatch.setattr(patches, "__file__", str(tmp_path / "patches" / "__init__.py"))
    assert len(patches.load_queue()) == len(QUEUE)
    (tmp_path / "patches" / "core" / "33-memory-released.toml").unlink()
    with pytest.raises(ValueError, match="install Banyan's wheel anew"):
        patches.load_queue()


def test_queue_when_a_class_is_watched_then_by_its_signature_or_method_by_method():
    """A body of thousands of lines changes with every release, and nobody can say what of it matters."""
    parsed = functools.cache(source.parsed_file)
    bodies = [one.target for patch in QUEUE for one in patch.sources if one.watches == "body"]
    wide = [name for name in bodies if isinstance(source.definition(name, parsed), ast.ClassDef | ast.Module)]
    assert wide == []


def test_changed_when_a_source_differs_or_is_gone_then_one_line_each_names_it(tmp_path):
    (tmp_path / "core").mkdir()
    path = tmp_path / "core" / "10-x.toml"
    path.write_text(
        textwrap.dedent("""\
        target = "sglang.srt.server_args.ServerArgs.from_cli_args"
        kind = "subclass"
        processes = ["main"]
        why = "a test"
        remove_when = "never"
        watches = "body"
        fingerprint = "0000"

        [[relies_on]]
        target = "sglang.srt.server_args.ServerArgs.resolve_once"
        watches = "signature"
        fingerprint = "1111"
        why = "as well"
        """)
    )
    lines = [str(misfit) for misfit in patches.changed(patches.load_queue(tmp_path))]
    assert len(lines) == 2 and all("core/10-x" in line for line in lines)
    assert "from_cli_args has another body (0000 ->" in lines[0] and "another signature (1111 ->" in lines[1]
    path.write_text(path.read_text().replace("from_cli_args", "gone"))
    misfit, _ = patches.changed(patches.load_queue(tmp_path))
    assert "gone is not defined" in misfit.reason


def test_upstream_definition_when_overloaded_then_the_body_that_runs_is_found():
    found = source.definition("sglang.srt.disaggregation.utils.get_kv_class")
    assert not found.decorator_list
    assert "NixlKVManager" in ast.unparse(found)


def test_definition_when_its_file_is_not_python_then_that_patch_does_not_fit_and_the_others_do(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "broken.py").write_text("def f(:\n")
    (tmp_path / "sglang" / "well.py").write_text("def f(): ...\n")
    tree = source.definition("sglang.well.f", folder=tmp_path)
    well, broken = (
        replace(QUEUE[0], target=f"sglang.{name}.f", fingerprint=source.fingerprint(tree), also=(), relies_on=())
        for name in ("well", "broken")
    )
    (misfit,) = patches.changed([broken, replace(well, watches="body")], tmp_path)
    assert misfit.patch is broken and "broken.py cannot be read" in misfit.reason


def test_definition_when_the_locale_has_another_encoding_then_it_is_read_as_python_reads_it(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "well.py").write_bytes("def f():\n    return 'ø'\n".encode())
    program = (
        "import sys; from pathlib import Path; from banyan.patches import source; "
        "folder = Path(sys.argv[1]); source.definition('sglang.well.f', folder=folder); "
        "assert source.text_of('sglang.well.f', folder=folder)"
    )
    plain = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", program, tmp_path], env={**os.environ, **plain}, check=True)


def test_load_queue_when_a_field_is_missing_then_the_file_is_named(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "20-y.toml").write_text('target = "a.b"\nprocesses = ["main"]\n')
    with pytest.raises(ValueError, match=r"core/20-y\.toml"):
        patches.load_queue(tmp_path)


def test_load_queue_when_a_patch_lies_in_no_folder_then_it_is_not_passed_over(tmp_path):
    (tmp_path / "20-y.toml").write_text("")
    with pytest.raises(ValueError, match=r"20-y\.toml: a patch lies in the folder"):
        patches.load_queue(tmp_path)


def test_load_queue_when_kind_and_hook_disagree_then_refused(tmp_path):
    (tmp_path / "core").mkdir()
    path = tmp_path / "core" / "30-z.toml"
    text = (
        'target = "a.b"\nkind = "after"\nprocesses = ["main"]\nwhy = "w"\nremove_when = "r"\nfingerprint = "f"\n'
        'watches = "body"\n'
    )
    path.write_text(text)
    with pytest.raises(ValueError, match="do not go together"):
        patches.load_queue(tmp_path)
    path.write_text(
        text.replace("after", "call") + '[[relies_on]]\ntarget = "c.d"\nwatches = "mind"\nfingerprint = "f"\n'
    )
    with pytest.raises(ValueError, match=r"core/30-z\.toml is not a patch: .*mind"):
        patches.load_queue(tmp_path)
