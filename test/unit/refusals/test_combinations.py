# SPDX-License-Identifier: Apache-2.0
"""Flags of Banyan's own that do nothing beside others, or for want of others."""

import pytest

from banyan.config import Config
from banyan.refusals.combinations import idle_lines

NODES = ["--banyan-secret-file", "--banyan-in-flight-kb"]


@pytest.mark.parametrize(
    ("asked", "given", "line"),
    [
        ({"share": "off"}, ["--banyan-host-gb", "--banyan-store-gb"], "--banyan-host-gb, --banyan-store-gb with"),
        ({"share": "off"}, NODES, "--banyan-secret-file, --banyan-in-flight-kb with --banyan-share off: nothing is"),
        ({}, ["--banyan-plan", "--banyan-store-admit"], "--banyan-store-admit without --banyan-store: no effect"),
        ({}, NODES, "--banyan-secret-file, --banyan-in-flight-kb without --banyan-listen, --banyan-peers: no effect"),
    ],
)
def test_flags_when_they_do_nothing_then_one_line_says_for_want_of_what(asked, given, line):
    (said,) = idle_lines(Config(policy="sglang", **asked), given)
    assert said.startswith(line)


def test_flags_when_what_they_are_for_is_there_then_nothing_is_said():
    nodes = Config(store=("/kv",), host_gb=1.0, listen="a:1", secret_file="s")
    assert idle_lines(nodes, ["--banyan-store", "--banyan-store-gb", "--banyan-listen", *NODES]) == []
    assert idle_lines(Config(share="off", policy="sglang"), ["--banyan-share", "--banyan-log-json"]) == []
