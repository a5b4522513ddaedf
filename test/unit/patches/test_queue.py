# SPDX-License-Identifier: Apache-2.0
"""The patch queue against the SGLang that is installed. Nothing of SGLang is imported here."""

import ast
import textwrap
from pathlib import Path

import pytest

from banyan import patches
from banyan.patches import index

QUEUE = patches.load_queue()


def fingerprint(source):
    return patches.fingerprint(ast.parse(source))


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


def test_changed_when_a_source_differs_or_is_gone_then_one_line_each_names_it(tmp_path):
    (tmp_path / "10-x.toml").write_text(
        textwrap.dedent("""\
        target = "sglang.srt.server_args.ServerArgs.from_cli_args"
        kind = "subclass"
        processes = ["main"]
        why = "a test"
        remove_when = "never"
        fingerprint = "0000"
        """)
    )
    (patch,) = patches.load_queue(tmp_path)
    (line,) = patches.changed([patch])
    assert "10-x" in line and "has changed (0000 ->" in line
    text = (tmp_path / "10-x.toml").read_text().replace("from_cli_args", "gone")
    (tmp_path / "10-x.toml").write_text(text)
    (line,) = patches.changed(patches.load_queue(tmp_path))
    assert "gone is not defined" in line


def test_upstream_definition_when_overloaded_then_the_body_that_runs_is_found():
    found = patches.upstream_definition("sglang.srt.disaggregation.utils.get_kv_class")
    assert not found.decorator_list
    assert "NixlKVManager" in ast.unparse(found)


def test_load_queue_when_a_field_is_missing_then_the_file_is_named(tmp_path):
    (tmp_path / "20-y.toml").write_text('target = "a.b"\nprocesses = ["main"]\n')
    with pytest.raises(ValueError, match=r"20-y\.toml"):
        patches.load_queue(tmp_path)


def test_load_queue_when_kind_and_hook_disagree_then_refused(tmp_path):
    (tmp_path / "30-z.toml").write_text(
        'target = "a.b"\nkind = "after"\nprocesses = ["main"]\nwhy = "w"\nremove_when = "r"\nfingerprint = "f"\n'
    )
    with pytest.raises(ValueError, match="do not go together"):
        patches.load_queue(tmp_path)


def test_docs_when_the_queue_changes_then_its_page_is_generated_again():
    page = Path(__file__).parents[3] / "docs" / "patches.md"
    assert page.read_text() == index.page(), "run: python -m banyan.patches.index > docs/patches.md"
