# SPDX-License-Identifier: Apache-2.0
import argparse
import pickle

import pytest

from banyan import config
from banyan.config import Config
from banyan.knobs import add_to
from banyan.routing import POLICIES


def parse(*argv):
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    return parser.parse_args(argv)


def test_take_flags_when_banyan_is_not_asked_for_then_none_and_no_flag_is_left():
    args = parse()
    assert config.take_flags(args) is None
    assert vars(args) == {}


def test_take_flags_when_all_are_given_then_config_holds_them_and_no_flag_is_left():
    args = parse(
        "--enable-banyan",
        *("--banyan-share", "off"),
        *("--banyan-min-fetch-tokens", "64"),
        "--banyan-no-prefix-hints",
        *("--banyan-plan", "move"),
    )
    assert config.take_flags(args) == Config(
        share="off",
        min_fetch_tokens=64,
        prefix_hints=False,
        policy="sglang",
        plan="move",
    )
    assert vars(args) == {}


def test_take_flags_when_a_value_is_out_of_range_then_the_flag_is_named():
    with pytest.raises(ValueError, match="--banyan-min-fetch-tokens 0"):
        config.take_flags(parse("--enable-banyan", "--banyan-min-fetch-tokens", "0"))


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        ([], ""),
        (["--banyan-keep-host-arena"], config.KEEP_FOLDER),
        (["--banyan-keep-host-arena", "/mnt/kv/"], "/mnt/kv"),
        # As SGLang reads them from a file of flags.
        (["--banyan-keep-host-arena", "true"], config.KEEP_FOLDER),
        (["--banyan-keep-host-arena", "false"], ""),
    ],
)
def test_take_flags_when_the_arena_is_to_be_kept_then_the_folder_is_absolute(flags, folder):
    taken = config.take_flags(parse("--enable-banyan", "--banyan-host-gb", "1", *flags))
    assert taken.keep_host_arena == folder


@pytest.mark.parametrize(
    ("flags", "has_arena", "sizes_arena"),
    [
        ([], True, True),
        (["--banyan-host-gb", "auto"], True, True),
        (["--banyan-host-gb", "0"], False, False),
        (["--banyan-host-gb", "2"], True, False),
        (["--banyan-share", "index"], False, False),
        (["--banyan-share", "off"], False, False),
    ],
)
def test_arena_when_its_size_is_left_open_then_there_is_one_where_ranks_fetch(flags, has_arena, sizes_arena):
    taken = config.take_flags(parse("--enable-banyan", *flags))
    assert (taken.has_arena, taken.sizes_arena) == (has_arena, sizes_arena)


def test_store_when_the_arena_is_left_open_then_it_has_one():
    assert config.take_flags(parse("--enable-banyan", "--banyan-store", "/kv")).has_arena


def test_config_when_it_travels_to_another_process_then_it_arrives_unchanged():
    wanted = Config(share="off", min_fetch_tokens=5)
    assert pickle.loads(pickle.dumps(wanted)) == wanted


@pytest.mark.parametrize(
    ("share", "shares", "fetches"), [("peer", True, True), ("index", True, False), ("off", False, False)]
)
def test_share_when_chosen_then_it_says_what_ranks_do(share, shares, fetches):
    assert (Config(share=share).shares, Config(share=share).fetches) == (shares, fetches)


def test_policies_when_listed_as_choices_then_they_are_the_ones_there_are():
    assert set(config.POLICY_CHOICES) == {*POLICIES, config.SGLANG_POLICY}
    assert config.DEFAULT_POLICY in POLICIES


@pytest.mark.parametrize(
    ("flags", "method", "policy"),
    [
        ([], "auto", config.DEFAULT_POLICY),
        ([], "total_tokens", "sglang"),
        (["--banyan-policy", "hybrid"], "total_tokens", "hybrid"),
        (["--banyan-policy", "sglang"], "auto", "sglang"),
        (["--banyan-share", "off"], "auto", "sglang"),
        (["--banyan-share", "index"], "auto", config.DEFAULT_POLICY),
        (["--banyan-no-prefix-hints"], "auto", "sglang"),
    ],
)
def test_policy_when_left_open_then_the_users_other_wishes_decide(flags, method, policy):
    args = parse("--enable-banyan", *flags)
    args.load_balance_method = method
    assert config.take_flags(args).policy == policy


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--banyan-policy", "lmetric", "--banyan-share", "off"], "--banyan-share index"),
        (["--banyan-policy", "lmetric", "--banyan-no-prefix-hints"], "--banyan-no-prefix-hints"),
        (["--banyan-hot-rank-factor", "0.5"], "--banyan-hot-rank-factor 0.5"),
        (["--banyan-keep-host-arena"], "--banyan-host-gb"),
        (["--banyan-store", "/kv", "--banyan-host-gb", "0"], "--banyan-host-gb"),
        (["--banyan-host-gb", "-1"], "--banyan-host-gb -1"),
        (["--banyan-tenant-share", "0.5"], "--banyan-tenant-secret-file"),
        (["--banyan-tenant-share", "1"], "--banyan-tenant-share 1"),
        (["--banyan-tenant-share", "0.5", "--banyan-tenant-secret-file", "s", "--banyan-host-gb", "0"], "host arena"),
        (["--banyan-hot-rank-factor", "nan"], "--banyan-hot-rank-factor nan"),
    ],
)
def test_take_flags_when_they_contradict_each_other_then_refused_with_the_way_out(flags, names):
    with pytest.raises(ValueError, match=names):
        config.take_flags(parse("--enable-banyan", *flags))


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("True", True), ("0", False), ("", False)])
def test_sizes_pool_after_capture_when_sglang_is_told_so_then_true(monkeypatch, value, expected):
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", value)
    assert config.sizes_pool_after_capture() is expected


@pytest.mark.parametrize(("value", "captures", "sends"), [(None, False, False), ("0", True, False), ("1", False, True)])
def test_settings_when_the_user_has_set_them_against_banyans_then_they_are_told(monkeypatch, value, captures, sends):
    for name in ("SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND", "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert (config.captures_states(), config.sends_cached_prefixes_early()) == (captures, sends)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("expandable_segments:True", True), ("max_split_size_mb:64, expandable_segments: true", True), ("", False)],
)
def test_uses_expandable_segments_when_the_allocator_is_told_so_then_true(monkeypatch, value, expected):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    assert config.uses_expandable_segments() is expected


def test_allowed_plugins_when_the_variable_is_unset_then_all_are(monkeypatch):
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    assert config.allowed_plugins() is None
    monkeypatch.setenv("SGLANG_PLUGINS", "banyan, other")
    assert config.allowed_plugins() == ["banyan", "other"]


NODES = ("--enable-banyan", "--banyan-secret-file", "secret")


def test_take_flags_when_nodes_are_named_then_they_are_dealt_with_and_otherwise_nothing_listens():
    taken = config.take_flags(parse(*NODES, "--banyan-listen", "10.0.0.1:7400", "--banyan-peers", "a:1,[::1]:2"))
    assert (taken.listen, taken.peers, taken.deals_with_nodes) == ("10.0.0.1:7400", ("a:1", "[::1]:2"), True)
    assert taken.reads_into_arena and taken.knows_weights
    plain = config.take_flags(parse("--enable-banyan"))
    assert not plain.listen and not plain.deals_with_nodes


@pytest.mark.parametrize("flags", [("--banyan-listen", "7400"), ("--banyan-peers", "a:1,b"), ("--banyan-peers", "a:0")])
def test_take_flags_when_an_address_is_none_then_the_flag_is_named(flags):
    with pytest.raises(ValueError, match=flags[0]):
        config.take_flags(parse(*NODES, *flags))


def test_take_flags_when_nodes_have_no_secret_or_no_arena_then_the_way_out_is_named():
    with pytest.raises(ValueError, match="openssl rand"):
        config.take_flags(parse("--enable-banyan", "--banyan-peers", "a:1"))
    with pytest.raises(ValueError, match="--banyan-host-gb"):
        config.take_flags(parse(*NODES, "--banyan-listen", "a:1", "--banyan-host-gb", "0"))


@pytest.mark.parametrize("flag", ["--banyan-store", "--banyan-listen", "--banyan-peers", "--banyan-keep-host-arena"])
@pytest.mark.parametrize(("value", "said"), [("", "nothing is said"), ("~/kv", "write the path out")])
def test_flag_when_a_variable_is_unset_or_a_home_is_not_expanded_then_it_is_no_value(flag, value, said, capsys):
    parser = argparse.ArgumentParser()
    add_to(parser, Config)
    with pytest.raises(SystemExit):
        parser.parse_args([f"{flag}={value}"])
    assert flag in (line := capsys.readouterr().err) and said in line


@pytest.mark.parametrize(
    ("carrier", "plugin"), [("tcp", ""), ("nixl", "UCX"), ("nixl+LIBFABRIC", "LIBFABRIC"), ("nixl+ucx", "UCX")]
)
def test_carrier_when_it_is_named_then_so_is_the_plugin_of_nixl(carrier, plugin):
    assert Config(carrier=carrier).nixl_plugin == plugin


@pytest.mark.parametrize("carrier", ["", "rdma", "nixl+", "nixl:UCX", "tcp+UCX", "nixl+../x", "nixl+UCX+UCX"])
def test_carrier_when_there_is_no_such_then_the_choices_are_named(carrier):
    with pytest.raises(ValueError, match=r"nixl\+PLUGIN"):
        Config(carrier=carrier)
