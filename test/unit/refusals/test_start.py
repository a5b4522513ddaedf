# SPDX-License-Identifier: Apache-2.0
"""What a rank may find: the lines name it, and the way out. No other file has such a text."""

import ast
from pathlib import Path

import pytest

from banyan.refusals import start

PLUGIN = Path(__file__).parents[3] / "python" / "banyan" / "sglang_plugin"


@pytest.mark.parametrize(
    ("line", "named", "way_out"),
    [
        (start.page_hash_refusal("no g++"), "no g++", "libssl-dev"),
        (start.allocator_refusal(allocator_class="NpuAllocator"), "NpuAllocator", "--banyan-share off"),
        (start.disagreement_refusal("16 and 64"), "16 and 64", "--banyan-share off"),
        (start.features_refusal(off="34-memory"), "34-memory in this one", "on all nodes"),
        (start.features_refusal(off=""), "none in this one", "on all nodes"),
        (start.shard_refusal(OSError("EMFILE")), "OSError: EMFILE", "--banyan-share off"),
        (start.pool_layout_refusal(), "KV pool", "--banyan-share off"),
        (start.pool_memory_refusal(need_bytes=3 << 30, error="ENOMEM"), "3.00 GiB", "--max-total-tokens"),
        (start.undecided_refusal(ValueError("not published")), "ValueError: not published", "--banyan-share off"),
        (start.arena_memory_refusal(need_bytes=7, error="ENOMEM"), "7 bytes", "--banyan-host-gb"),
        (start.http_worker_refusal("core is off"), "core is off", "--tokenizer-worker-num 1"),
        (start.http_app_refusal(), "SGLANG_HTTP_SERVER_APP_PATH", "unset it"),
        (start.arena_size_refusal(need_bytes=3 << 30, available_bytes=2 << 30), "--banyan-host-gb 3: 2.00", "lower it"),
        (start.kept_arena_refusal(folder="/x", error="in use"), "--banyan-keep-host-arena /x", "name a folder"),
        (start.pinning_refusal("800"), "800", "--banyan-host-gb"),
        (start.store_refusal(paths=["/a", "/b"], error="newer: use another"), "--banyan-store /a,/b", "use another"),
        (start.page_server_refusal(address="a:1", error="in use"), "--banyan-listen a:1", "two free ports"),
        (start.weights_refusal("no files"), "no files", "--banyan-store"),
    ],
)
def test_line_when_printed_then_it_names_the_cause_and_the_way_out(line, named, way_out):
    assert named in line and way_out in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("chunk_tokens", "num_ranks", "fitting"), [(1000, 1, "992"), (2730, 3, "8160"), (10, 1, "16"), (7, 3, "48")]
)
def test_chunk_when_it_ends_within_a_page_then_the_page_and_a_size_that_fits_are_named(
    chunk_tokens, num_ranks, fitting
):
    line = start.chunk_refusal(chunk_tokens=chunk_tokens, page_tokens=16, num_ranks=num_ranks)
    assert f"{chunk_tokens} tokens" in line and "a page of 16" in line
    assert line.endswith(f"use --chunked-prefill-size {fitting}")
    rank_tokens = int(fitting) // num_ranks
    assert start.chunk_refusal(chunk_tokens=rank_tokens, page_tokens=16, num_ranks=num_ranks) is None


@pytest.mark.parametrize(
    ("components", "way_out"),
    [
        (["FULL", "SWA"], "--disable-hybrid-swa-memory"),
        (["FULL", "MAMBA"], "use --banyan-share off"),
        (["FULL", "MAMBA", "SWA"], "use --banyan-share off"),
    ],
)
def test_components_when_a_window_is_the_only_obstacle_then_its_flag_is_named(components, way_out):
    line = start.components_refusal(components)
    assert all(name in line for name in components) and way_out in line
    assert ("--disable-hybrid-swa-memory" in line) is ("MAMBA" not in components)


def refusing_calls():
    for path in sorted(PLUGIN.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "refuse":
                yield path.relative_to(PLUGIN), node


def test_plugin_when_it_refuses_then_the_text_comes_from_refusals():
    calls = list(refusing_calls())
    assert len(calls) > 15
    own = [
        f"{path}:{call.lineno}"
        for path, call in calls
        if any(isinstance(argument, ast.Constant | ast.JoinedStr) for argument in call.args)
    ]
    assert not own, "\n".join(own)
