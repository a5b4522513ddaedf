# SPDX-License-Identifier: Apache-2.0
"""What the dry run says of flags that change SGLang's cache is what happens: a server starts with the tree that it told
of, or ends with the reason that it gave, as its last line."""

import pytest
from test.e2e.conftest import Client
from test.e2e.test_hostile import ENGINE, prompt

from banyan.sglang_plugin.launcher.dry_run import examine
from benchmark.modes import models
from benchmark.modes.run import ENV
from benchmark.servers import ServerFailed, ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]
CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
TLRU = ("--radix-eviction-policy", "tlru", "--radix-eviction-policy-config")
STARTS = {
    "python core": ({CORE: "python"}, ()),
    "sessions": ({}, ("--enable-session-radix-cache",)),
    "priorities": ({}, ("--radix-eviction-policy", "priority", "--enable-priority-scheduling")),
    "tail": ({}, (*TLRU, '{"threshold": 100, "next_prompt_estimate": 10}')),
}
ENDS = {
    "unknown core": ({CORE: "none-such"}, ()),
    "unknown option": ({}, ("--radix-eviction-policy", "lfu", "--radix-eviction-policy-config", '{"half_life": 1}')),
}


def serve(folder, variables, flags):
    # Named each time: servers are forks of a process that has the first one's variables.
    env = (*cpu_env(dp=2), *ENV, *{CORE: "rust", **variables}.items())
    return ForkedServer(
        ServerSpec("dry", 2, "on", (*ENGINE, "--banyan-plan", "move", *flags), env), models.ensure(models.LLAMA), folder
    )


def told(monkeypatch, variables, flags):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked = [
        "--model-path",
        str(models.ensure(models.LLAMA)),
        "--device",
        "cpu",
        "--dp",
        "2",
        "--enable-banyan",
        *ENGINE,
        *flags,
    ]
    return examine(asked)


def ended(server):
    """``(what it ended with, last line)`` of a server that does not start."""
    with pytest.raises(ServerFailed, match="ended with") as failed:
        wait_ready([server])
    return str(failed.value).splitlines()[0].rpartition(" ")[2], server.log_path.read_text().splitlines()[-1]


@pytest.mark.parametrize("name", STARTS)
def test_server_when_the_dry_run_says_that_it_starts_then_it_does_with_that_tree_and_shares(
    name, alone, tmp_path, monkeypatch
):
    variables, flags = STARTS[name]
    said = told(monkeypatch, variables, flags)
    assert not said["failed"] and not said["refused"]
    core, policy = said["settled"]["tree"].split(", evicts ")
    with serve(tmp_path, variables, flags) as server:
        wait_ready([server])
        client, asked = Client(server), prompt(400, 1)
        fresh, _ = client.generate(asked, rank=0)
        again, info = client.generate(asked, rank=1)
        assert again == fresh and info["cached_tokens_details"]["peer"] >= 384
        log = server.log_path.read_text()
    assert f"Tree Core: {core}" in log
    assert ("SGLang evicts as" in log) is (policy != "lru")


@pytest.mark.parametrize("name", ENDS)
def test_server_when_the_dry_run_says_that_it_fails_then_it_ends_with_that_reason(name, alone, tmp_path, monkeypatch):
    variables, flags = ENDS[name]
    (reason,) = told(monkeypatch, variables, flags)["failed"]
    with serve(tmp_path, variables, flags) as server:
        status, last = ended(server)
    assert status == "1" and last.startswith("banyan: ") and last.endswith(reason)


def test_server_when_a_rank_refuses_then_its_reason_is_the_last_line(alone, tmp_path):
    with serve(tmp_path, {}, ("--banyan-host-gb", "0.00001")) as server:
        status, last = ended(server)
    assert status == "2" and last.startswith("banyan: refused: ") and "--banyan-host-gb" in last


def test_server_when_its_store_cannot_be_one_then_refused_before_any_rank_starts(alone, tmp_path):
    (tmp_path / "store").write_text("")
    with serve(tmp_path, {}, ("--banyan-store", str(tmp_path / "store"))) as server:
        status, last = ended(server)
        assert "scheduler" not in server.log_path.read_text().lower()
    assert status == "2" and last.startswith("banyan: refused: --banyan-store") and "name one" in last
