# SPDX-License-Identifier: Apache-2.0
"""Programs without a server: plugins are there before the command line is read, as in SGLang's own launcher."""

from banyan.sglang_plugin.launcher import offline as module


def test_engine_when_it_is_made_then_the_command_line_is_read_with_plugins_loaded(monkeypatch):
    done = []
    monkeypatch.setattr(module, "load_plugins", lambda: done.append("plugins"))
    monkeypatch.setattr(module, "prepare_server_args", lambda argv: done.append(argv) or "arguments")
    monkeypatch.setattr(module, "Engine", lambda *, server_args: (server_args, "engine"))
    assert module.engine("--model-path", "M", "--enable-banyan") == ("arguments", "engine")
    assert done == ["plugins", ["--model-path", "M", "--enable-banyan"]]
