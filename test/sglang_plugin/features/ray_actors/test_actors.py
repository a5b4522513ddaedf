# SPDX-License-Identifier: Apache-2.0
"""A process that Ray has started for a rank: hooked when it takes up the arguments. Others, which copy them too, are
not taken for one."""

import copy
import json
import multiprocessing
import pickle
from types import SimpleNamespace

import pytest
from test import imported

from banyan import config, feature_list
from banyan.config import Config
from banyan.feature import Asked
from banyan.features import ray_actors
from banyan.features.ray_actors.rank.actor import Start
from banyan.layout import Layout
from banyan.sglang_plugin import runtime

ACTOR = """
import json, os, pickle, sys
from types import SimpleNamespace
from banyan.sglang_plugin import runtime, seams

was_main = runtime.is_main_process()
pickle.loads(bytes.fromhex(sys.argv[1]))
runtime.get_server_args = lambda: SimpleNamespace(_banyan={"needed": []})
seams.verify("scheduler")
said = {"missing": [str(one) for one in seams.HOOKS.missing("scheduler")], "off": runtime.features_off()}
print("REPORT", json.dumps([was_main, runtime.is_main_process(), said, os.environ.get("BANYAN_TEST_OF_ACTORS")]))
"""


def report(run):
    lines = [line for line in run.stdout.splitlines() if line.startswith("REPORT")]
    assert lines, run.stderr[-2000:]
    return json.loads(lines[-1].removeprefix("REPORT"))


@pytest.fixture
def start(monkeypatch):
    """What a driver sends whose planner is off, and which has a variable for its ranks."""
    monkeypatch.setattr(runtime, "_features_off", {"planner"})
    monkeypatch.setattr(config, "_inherited", {"BANYAN_TEST_OF_ACTORS": "told"})
    return pickle.dumps(Start())


def test_actor_when_it_takes_up_the_arguments_then_it_is_a_rank_with_all_hooks_and_knows_what_is_off(start):
    was_main, is_main, said, variable = report(imported.run(ACTOR, start.hex()))
    assert was_main and not is_main
    assert said == {"missing": [], "off": ["planner"]} and variable == "told"


def test_arguments_when_this_process_copies_them_or_a_child_takes_them_up_then_neither_becomes_a_rank(start):
    assert isinstance(copy.deepcopy(Start()), Start) and runtime.is_main_process()
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def child():
        pickle.loads(start)
        sending.send(runtime._is_rank)

    process = context.Process(target=child)
    process.start()
    assert receiving.poll(60) and receiving.recv() is False
    process.join()


def test_server_when_it_does_not_use_ray_then_nothing_is_left_for_actors():
    for args in (None, SimpleNamespace(use_ray=False)):
        asked = Asked(config=Config(), args=args)
        assert ray_actors.PARTS.carried(asked) == {} and feature_list.lines(asked) == []


@pytest.mark.parametrize(
    ("layout", "named", "way_out"),
    [
        (Layout(dp=2, attn_dp=1, attn_cp=1, attn_tp=1), "2 ranks", "a server for each rank"),
        (Layout(dp=1, attn_dp=2, attn_cp=1, attn_tp=1), "2 ranks", "a server for each rank"),
        (Layout(dp=1, attn_dp=1, attn_cp=1, attn_tp=2, num_nodes=2), "--nnodes 2", "use --nnodes 1"),
    ],
)
def test_server_when_its_ranks_or_nodes_are_too_many_for_actors_then_refused_unless_it_shares_nothing(
    layout, named, way_out
):
    asked = Asked(config=Config(), args=SimpleNamespace(use_ray=True), layout=layout)
    (line,) = feature_list.lines(asked)
    assert line.startswith("--use-ray with ") and named in line and way_out in line
    assert feature_list.lines(Asked(config=Config(share="off"), args=asked.args, layout=layout)) == []


def test_server_when_it_has_one_rank_of_several_shards_then_served():
    layout = Layout(dp=1, attn_dp=1, attn_cp=1, attn_tp=2)
    asked = Asked(config=Config(), args=SimpleNamespace(use_ray=True), layout=layout)
    assert feature_list.lines(asked) == [] and ray_actors.PARTS.carried(asked)
