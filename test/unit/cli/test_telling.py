# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from banyan import cli
from banyan.cli import telling
from banyan.cli.engine import EngineError


class Fake:
    def __init__(self, url, *, api_key=None):
        self.told, self.asked = [], []
        Fake.last = self

    def tell_cache(self, command):
        self.told.append(command)
        if command["action"] == "list":
            one = {"action": "pin", "key": "ab12", "num_tokens": 4096, "expires_in_s": 12.4, "in_pool": False}
            return {"action": "list", "prefixes": [one]}
        if command["action"] == "pin" and command.get("ttl_s") == 1:
            raise EngineError("over the budget")
        return {"action": command["action"], "num_tokens": 32, "num_pages": 2, "num_pages_found": 1}

    def served_model(self):
        return "org/m:8b"

    def tokens(self, question):
        self.asked.append(question)
        return [] if question.get("messages") == [] else [1, 2]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(telling, "Engine", Fake)

    def run(*words, prompt=None):
        if prompt is not None:
            (tmp_path / "prompt").write_text(prompt if isinstance(prompt, str) else json.dumps(prompt))
            words = (*words, "--prompt-file", str(tmp_path / "prompt"))
        status = cli.main(["cache", *words])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.mark.parametrize(
    "words, prompt, said",
    [
        ((), "You are", {"text": "You are"}),
        ((), "[1, 2]", {"text": "[1, 2]"}),
        ((), {"input_ids": [5]}, {"input_ids": [5]}),
        (
            (),
            {"input_ids": [5], "cache_salt": "t", "extra_key": "k"},
            {"cache_salt": "t", "extra_key": "k", "input_ids": [5]},
        ),
        (("--salt", "u"), {"prompt": "x", "cache_salt": "t"}, {"cache_salt": "u", "text": "x"}),
        ((), {"prompt": "x"}, {"text": "x"}),
        ((), {"messages": [{"role": "user"}]}, {"input_ids": [1, 2]}),
        ((), {"messages": [{"content": [{"type": "text", "text": "x"}]}], "model": "org/m:8b"}, {"input_ids": [1, 2]}),
        (("--path", "/api/chat"), {"messages": [{"role": "user"}], "model": "m:8b"}, {"input_ids": [1, 2]}),
        (("--path", "/v1/messages"), {"messages": [{"role": "user"}]}, {"input_ids": [1, 2]}),
    ],
)
def test_prompt_when_it_is_text_or_a_request_then_told_as_the_server_takes_it(run, words, prompt, said):
    status, out, _ = run("prefetch", *words, prompt=prompt)
    assert status == 0 and Fake.last.told == [{"action": "prefetch", **said}]
    assert out == "prefetch: 32 tokens in 2 pages, 1 of them found\n"
    assert all(("banyan_path" in question) == ("--path" in words) for question in Fake.last.asked)


@pytest.mark.parametrize("answer", [{}, {"action": "pin"}, {"action": "list", "prefixes": [{"action": None}]}, None])
def test_answer_when_it_is_another_releases_then_one_line_and_status_1(run, monkeypatch, answer):
    monkeypatch.setattr(Fake, "tell_cache", lambda self, command: answer)
    status, out, err = run("ls")
    assert (status, out) == (1, "") and "another release" in err and err.count("\n") == 1


def test_fields_when_given_then_told_and_answers_are_machine_readable_on_request(run):
    _, out, _ = run("pin", "--ttl", "60", "--salt", "t", "--extra-key", "k", "--json", prompt="x")
    assert Fake.last.told == [{"action": "pin", "ttl_s": 60, "cache_salt": "t", "extra_key": "k", "text": "x"}]
    assert json.loads(out)["num_pages"] == 2


def test_list_when_asked_for_then_a_line_for_each_prefix(run):
    assert run("ls")[1] == "pin      ab12      4,096 tokens, 12 s left, not in the pools\n"


def test_list_when_a_key_has_commands_of_a_terminal_then_they_are_text(run, monkeypatch):
    one = {"action": "pin", "key": "\x1b[2J", "num_tokens": 1, "expires_in_s": 1, "in_pool": True}
    monkeypatch.setattr(Fake, "tell_cache", lambda self, command: {"action": "list", "prefixes": [one]})
    assert "\x1b" not in run("ls")[1]


@pytest.mark.parametrize(
    "words, prompt, said",
    [
        (("pin",), None, "--prompt-file"),
        (("pin", "--prompt-file", "/nowhere"), None, "/nowhere"),
        (("pin",), {"messages": []}, "--path"),
        (("pin",), {"prompt": "x", "lora_path": "a"}, "lora_path"),
        (("pin",), {"prompt": "x", "model": "org/m:8b:a"}, "model org/m:8b:a"),
        (("pin",), {"text": "x", "image_data": "data:x"}, "image_data"),
        (("pin",), {"messages": [{"content": [{"type": "image_url"}]}]}, "image_url"),
        (("pin",), {"messages": [{"content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]}, "image"),
        (("pin",), {"input": [{"type": "message", "content": [{"type": "input_file"}]}]}, "input_file"),
        (("pin", "--ttl", "1"), "x", "over the budget"),
    ],
)
def test_command_when_refused_then_one_line_and_status_1(run, words, prompt, said):
    status, out, err = run(*words, prompt=prompt)
    assert (status, out) == (1, "") and said in err and err.count("\n") == 1
