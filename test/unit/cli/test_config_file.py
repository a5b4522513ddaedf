# SPDX-License-Identifier: Apache-2.0
"""``banyan config``, and the server's and the router's flags beside a file."""

import argparse

import pytest

from banyan import cli, config
from banyan.cli import config_file
from banyan.router import settings


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "banyan.toml"
        path.write_text(text)
        return path

    return write


def server(*words):
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    return config.take_flags(parser.parse_args(["--enable-banyan", *words]))


def router(*words):
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    return settings.take_flags(parser.parse_args(words))


def test_server_when_file_and_flags_differ_then_flags_win(file):
    path = str(file('[server]\nhost-gb = 3\nplan = "move"\nno-prefix-hints = true\npolicy = "sglang"\n'))
    taken = server("--banyan-config", path, "--banyan-plan", "measured")
    assert (taken.host_gb, taken.plan, taken.prefix_hints) == (3.0, "measured", False)
    assert server("--banyan-config", path, "--banyan-host-gb", "auto").host_gb is None
    assert server().host_gb is None and server().plan == "measured"


def test_server_when_the_file_is_wrong_then_its_line(file):
    with pytest.raises(ValueError, match=r"banyan\.toml:2: host-gb: a size in GiB"):
        server("--banyan-config", str(file("[server]\nhost-gb = -1\n")))


def test_server_when_the_file_leaves_the_policy_open_then_it_is_chosen_as_without_a_file(file):
    assert server("--banyan-config", str(file("[server]\nhost-gb = 1\n"))).policy == config.DEFAULT_POLICY


def test_router_when_file_and_flags_differ_then_flags_win(file):
    path = str(file('[router]\nserver = ["http://a:1/", "http://b:1"]\nport = 5\nno-tokenize = true\n'))
    taken = router("--config", path)
    assert (taken.servers, taken.port, taken.tokenize) == (("http://a:1", "http://b:1"), 5, False)
    taken = router("--config", path, "--server", "http://c:1", "--port", "6")
    assert (taken.servers, taken.port) == (("http://c:1",), 6)


def test_check_when_keys_are_wrong_in_both_tables_then_every_line_and_exit_2(file, capsys):
    path = file('[server]\nshare = "pear"\n[router]\nport = "x"\n')
    assert cli.main(["config", "check", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path}:2: share: one of peer, index, off" in said and f"{path}:4: port: PORT" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[server]\nshare = "off"\npolicy = "lmetric"\n', "nothing to look up"),
        ('[server]\nstore = "/kv"\nhost-gb = 0\n', "--banyan-host-gb"),
        ('[router]\nserver = ["ftp://x"]\n', "a URL like"),
        ("[serve]\n", "no such table"),
    ],
)
def test_check_when_keys_do_not_go_together_then_the_flags(file, text, said):
    (line,) = config_file.problems(file(text))
    assert said in line


@pytest.mark.parametrize(
    "text", ["", '[server]\nshare = "off"\n', "[server]\nno-prefix-hints = true\n", "[router]\nport = 5\n"]
)
def test_check_when_it_is_well_then_exit_0(file, text, capsys):
    assert cli.main(["config", "check", str(file(text))]) == 0


def test_show_when_it_is_written_to_a_file_then_it_is_well_and_holds_every_flag(file, capsys):
    assert cli.main(["config", "show"]) == 0
    text = capsys.readouterr().out
    assert config_file.problems(file(text)) == []
    for table in config_file.TABLES:
        assert [key for key in table.knobs() if f"# {key} = " not in text] == []
    given = file('[server]\nhost-gb = 2.5\nstore = ["/a", "/b"]\n[router]\nserver = ["http://a:1"]\n')
    assert cli.main(["config", "show", str(given)]) == 0
    again = file(capsys.readouterr().out)
    assert server("--banyan-config", str(again)).store == ("/a", "/b")
    assert router("--config", str(again)).servers == ("http://a:1",)
