# SPDX-License-Identifier: Apache-2.0
"""Flags of Banyan's own that do nothing beside others, or for want of others."""

import pytest

from banyan.config import Config
from banyan.feature import Asked
from banyan.knobs import knobs_of
from banyan.layout import Layout
from banyan.refusals.combinations import idle_lines

ONE_RANK = Layout.of_flags(
    tp_size=1, dp_size=1, attn_dp_size=1, attn_cp_size=1, enable_dp_attention=False, dwdp_size=1, num_nodes=1, node=0
)
OFF = {"share": "off", "policy": "sglang"}
BORROWS = {"host_gb": 1.0, "peers": ("a:1",), "secret_file": "s"}
LENDS = {"host_gb": 1.0, "listen": "a:1", "secret_file": "s"}
NEEDS_NODES = "without --banyan-listen, --banyan-peers"
IN_ANY_CASE = {
    *("--banyan-share", "--banyan-log-json", "--banyan-no-answer-details", "--banyan-policy"),
    "--banyan-tenant-secret-file",
}
"""What these say holds whatever else was asked for."""


@pytest.mark.parametrize(
    ("asked", "given", "line"),
    [
        (OFF, ["--banyan-host-gb", "--banyan-store-gb"], "--banyan-host-gb, --banyan-store-gb with --banyan-share off"),
        (OFF, ["--banyan-told-share"], "--banyan-told-share with --banyan-share off: nothing is kept"),
        (OFF, ["--banyan-plan", "--banyan-min-fetch-tokens"], "--banyan-plan, --banyan-min-fetch-tokens with"),
        (
            OFF,
            ["--banyan-tell-lines", "--banyan-no-prefix-hints"],
            "--banyan-tell-lines, --banyan-no-prefix-hints with",
        ),
        (OFF, ["--banyan-secret-file"], f"--banyan-secret-file {NEEDS_NODES} or --disaggregation-mode"),
        ({"share": "index"}, ["--banyan-plan"], "--banyan-plan with --banyan-share index and no host arena"),
        ({}, ["--banyan-plan", "--banyan-store-admit"], "--banyan-store-admit without --banyan-store: no effect"),
        ({"store": ("mooncake://a:1",)}, ["--banyan-store-gb"], "--banyan-store-gb with mooncake://"),
        ({}, ["--banyan-in-flight-kb", "--banyan-carrier"], f"--banyan-in-flight-kb, --banyan-carrier {NEEDS_NODES}:"),
        (BORROWS, ["--banyan-in-flight-kb"], "--banyan-in-flight-kb without --banyan-listen: nothing is lent"),
        ({}, ["--banyan-secret-file", "--banyan-dscp"], f"--banyan-secret-file, --banyan-dscp {NEEDS_NODES} or"),
        ({}, ["--banyan-ib-service-level"], "--banyan-ib-service-level without --disaggregation-mode"),
        ({"policy": "sglang"}, ["--banyan-hot-rank-factor"], "--banyan-hot-rank-factor with --banyan-policy sglang"),
        ({}, ["--banyan-copy-sms"], "--banyan-copy-sms with --device cpu"),
    ],
)
def test_flags_when_they_do_nothing_then_one_line_says_for_want_of_what(asked, given, line):
    (said,) = idle_lines(Asked(config=Config(**{"policy": "lmetric", **asked})), given)
    assert said.startswith(line)


def test_flag_when_there_is_one_rank_then_none_is_hot():
    (said,) = idle_lines(Asked(config=Config(), layout=ONE_RANK), ["--banyan-hot-rank-factor"])
    assert said.endswith("or one rank: Banyan chooses no rank")


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (Asked(config=Config(store=("/kv",), **LENDS)), ["--banyan-store-gb", "--banyan-secret-file", "--banyan-dscp"]),
        (Asked(config=Config(**LENDS)), ["--banyan-in-flight-kb", "--banyan-carrier", "--banyan-listen"]),
        (Asked(config=Config(**OFF)), ["--banyan-share", "--banyan-log-json", "--banyan-no-answer-details"]),
        (Asked(config=Config(share="index", host_gb=1.0)), ["--banyan-plan", "--banyan-min-fetch-tokens"]),
        (Asked(config=Config(policy="lmetric"), device="cuda"), ["--banyan-copy-sms", "--banyan-hot-rank-factor"]),
        *[
            (
                Asked(config=Config(**wanted), disaggregation_mode="decode"),
                ["--banyan-secret-file", "--banyan-dscp", "--banyan-ib-service-level"],
            )
            for wanted in ({}, OFF)
        ],
    ],
)
def test_flags_when_what_they_are_for_is_there_then_nothing_is_said(asked, given):
    assert idle_lines(asked, given) == []


def test_flags_when_one_does_nothing_somewhere_then_it_has_a_line_there():
    """A new flag is named above, or it has a row."""
    flags = {one.flag for _, _, one in knobs_of(Config)}
    cases = [Asked(config=Config(**wanted)) for wanted in (OFF, {})]
    with_a_row = {flag for flag in flags if any(idle_lines(asked, [flag]) for asked in cases)}
    assert flags - with_a_row == IN_ANY_CASE
