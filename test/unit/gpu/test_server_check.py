# SPDX-License-Identifier: Apache-2.0
"""What a server step of ``make gpu-check`` holds to be shown."""

import argparse
import importlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from test.gpu.engine import SERVER, Answer

GB = 1e9
WEIGHTS_8B = 16 * GB
TOKEN_BYTES_8B = 128 << 10


@pytest.fixture
def server_check(monkeypatch):
    """The script: it finds what lies beside it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "gpu"))
    return importlib.import_module("server_check")


def check_of(server_check, *, staged, peer, host):
    """A check of two servers that answered the same."""
    args = argparse.Namespace(staged=staged, damaged=None, all_gpus=False, no_profile=False)
    check = server_check.Check(args)
    answers = [Answer((1, 2), [7], 2, 1, {"peer": peer, "host": host}, 0.1)]
    check.answers = {"off": answers, "peer": answers}
    check.divergences = {"off": 0.01, "peer": 0.01}
    check.waits = {"off": Counter(x=1), "peer": Counter(x=1)}
    return check


@pytest.mark.parametrize(
    ("staged", "peer", "host", "holds"),
    [(False, 16, 0, True), (False, 0, 0, False), (True, 0, 16, True), (True, 16, 16, False), (True, 0, 0, False)],
    ids=["from a pool", "from nowhere", "by the arena", "from a pool that nobody can open", "not even by the arena"],
)
def test_verdict_when_pages_took_a_way_then_it_has_to_be_the_one_that_there_is(server_check, staged, peer, host, holds):
    assert all(check_of(server_check, staged=staged, peer=peer, host=host).verdict().values()) is holds


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (
            "tokens_are_those_of_sharing_off_behind_the_same_prefix",
            lambda check: check.answers["peer"][0].tokens.__setitem__(0, 8),
        ),
        ("enough_was_compared", lambda check: check.answers.update(off=[])),
        ("hits_are_as_near_as_sglangs_own", lambda check: check.divergences.update(peer=0.03)),
        ("hits_are_as_near_as_sglangs_own", lambda check: check.divergences.pop("peer")),
        ("sharing_adds_no_wait_for_the_device", lambda check: check.waits.update(peer=Counter(x=9))),
        ("sharing_adds_no_wait_for_the_device", lambda check: check.waits.update(peer="no trace")),
    ],
    ids=["another token", "another shape", "far from an empty cache", "no hit", "waits", "no trace"],
)
def test_verdict_when_a_transport_is_not_right_or_nothing_shows_it_then_that_condition_does_not_hold(
    server_check, name, damage
):
    check = check_of(server_check, staged=False, peer=16, host=0)
    check.answers["peer"] = [replace(answer, tokens=list(answer.tokens)) for answer in check.answers["peer"]]
    assert all(check.verdict().values())
    damage(check)
    assert [condition for condition, holds in check.verdict().items() if not holds] == [name]


def test_verdict_when_something_does_not_hold_then_the_last_line_names_it(server_check):
    assert server_check.verdict_line({"a_b": True, "c": True}) == "all 2 conditions hold"
    assert server_check.verdict_line({"a_b": False, "c": True}) == "not so: a b"


@pytest.mark.parametrize(("visible", "expected"), [("", "2,5"), ("7,6,5,4,3,GPU-one", "5,GPU-one")])
def test_server_when_two_gpus_are_named_then_it_sees_these_alone_and_its_pools_have_handles(
    server_check, monkeypatch, visible, expected
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert server_check.environment_of(gpus="2,5", staged=True) == {"CUDA_VISIBLE_DEVICES": expected}
    assert server_check.environment_of(gpus="", staged=True) == server_check.WITHOUT_HANDLES
    assert server_check.environment_of(gpus="", staged=False) == {}


def test_server_when_its_model_is_tiny_then_pages_are_moved_all_the_same():
    assert SERVER[SERVER.index("--banyan-plan") + 1] == "move", "the planner would find computing cheaper"


def test_server_when_two_ranks_of_an_8b_model_share_80_gb_then_weights_and_pools_find_room():
    share = float(SERVER[SERVER.index("--mem-fraction-static") + 1])
    pool_bytes = int(SERVER[SERVER.index("--max-total-tokens") + 1]) * TOKEN_BYTES_8B
    assert 2 * (WEIGHTS_8B + pool_bytes) < share * 79 * GB, "SGLang counts the weights of both against its share"
