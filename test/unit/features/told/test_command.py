# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.features.told.command import Action, Command


@pytest.mark.parametrize(
    "body, said",
    [
        ({}, "action"),
        ({"action": "burn", "input_ids": [1]}, "action"),
        ({"action": "pin"}, "input_ids"),
        ({"action": "pin", "input_ids": "12"}, "input_ids"),
        ({"action": "pin", "input_ids": [1, "2"]}, "input_ids"),
        ({"action": "pin", "input_ids": [1, -2]}, "input_ids"),
        ({"action": "pin", "input_ids": [1 << 70]}, "input_ids|ids"),
        ({"action": "pin", "input_ids": [1], "ttl_s": 0}, "ttl_s"),
        ({"action": "pin", "input_ids": [1], "ttl_s": float("nan")}, "ttl_s"),
        ({"action": "pin", "input_ids": [1], "ttl_s": 1e9}, "ttl_s"),
        ({"action": "pin", "input_ids": [1], "ttl_s": "long"}, "ttl_s"),
        ({"action": "pin", "input_ids": [1], "cache_salt": "s" * 2000}, "cache_salt"),
        ({"action": "pin", "input_ids": [1], "more": 1}, "more"),
    ],
)
def test_command_when_it_is_none_then_refused_naming_the_field(body, said):
    with pytest.raises(ValueError, match=said):
        Command.of(body)


def test_command_when_it_is_passed_on_then_the_same():
    command = Command.of({"action": "retain", "input_ids": [5, 6], "ttl_s": 60, "cache_salt": "s", "session": "x"})
    assert Command.of_passed_on(command.body()) == command and command.action is Action.RETAIN
    assert Command.of({"action": "list"}).input_ids == []


@pytest.mark.parametrize("body", [None, [], {}, {"action": "pin", "input_ids": b"abc"}, {"action": "pin"}])
def test_command_when_what_is_passed_on_is_none_then_refused(body):
    with pytest.raises(ValueError):
        Command.of_passed_on(body)


def test_command_when_it_has_a_long_prompt_then_its_tokens_are_passed_on_in_one_piece():
    ids = Command.of({"action": "pin", "input_ids": list(range(10_000))}).body()["input_ids"]
    assert isinstance(ids, bytes) and len(ids) == 40_000


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_command_when_a_salt_or_key_is_empty_then_it_is_none_as_in_a_request(field):
    assert getattr(Command.of({"action": "pin", "input_ids": [1], field: ""}), field) is None
