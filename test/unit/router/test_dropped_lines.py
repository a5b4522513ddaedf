# SPDX-License-Identifier: Apache-2.0
import asyncio
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test.unit.router.fake_server import FakeServer, running

from banyan.router.dropped_lines import MOST_CHARACTERS, DroppedLines
from banyan.router.paths import BY_PATH
from banyan.router.settings import Settings

PATTERN = r"^x-billing: \w+$"
LINE = "x-billing: 7f3a"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def dropped(path, body, pattern=PATTERN):
    lines = DroppedLines(re.compile(pattern))
    return lines.without(BY_PATH[path], body), lines.num_lines


def system(content, role="system"):
    return {"role": role, "content": content}


def text(words):
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("path", "sent", "passed_on"),
    [
        (CHAT, {"messages": [system(f"{LINE}\nhello")]}, {"messages": [system("hello")]}),
        (CHAT, {"messages": [system(f"a\n{LINE}\nb", "developer")]}, {"messages": [system("a\nb", "developer")]}),
        (
            CHAT,
            {"messages": [system([text(LINE), text("rules"), {"type": "image"}])]},
            {"messages": [system([text("rules"), {"type": "image"}])]},
        ),
        (CHAT, {"messages": [system([text(LINE)])]}, {"messages": [system([text("")])]}),
        (MESSAGES, {"system": f"{LINE}\nrules"}, {"system": "rules"}),
        (
            MESSAGES,
            {"system": [text(LINE), text("rules") | {"cache_control": {}}]},
            {"system": [text("rules") | {"cache_control": {}}]},
        ),
        (RESPONSES, {"instructions": f"rules\n{LINE}", "input": "hi"}, {"instructions": "rules", "input": "hi"}),
        (RESPONSES, {"input": [system(f"{LINE}\nrules")]}, {"input": [system("rules")]}),
        ("/api/generate", {"system": f"{LINE}\nrules", "prompt": LINE}, {"system": "rules", "prompt": LINE}),
    ],
)
def test_without_when_a_line_matches_then_it_is_gone_and_the_rest_is_there(path, sent, passed_on):
    body, num_lines = dropped(path, json.dumps(sent).encode())
    assert (json.loads(body), num_lines) == (passed_on, 1)


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        (CHAT, {"messages": [system(LINE, "user"), system(LINE, "tool"), system("my " + LINE)]}),
        (CHAT, {"messages": [{"role": ["system"], "content": LINE}, "system", {"content": LINE}, [LINE], None]}),
        (CHAT, {"messages": [system(None), system({"text": LINE}), system([LINE, {"text": 5}, None])]}),
        (CHAT, {"messages": LINE, "system": LINE}),
        (MESSAGES, {"system": {"text": LINE}, "messages": 5}),
        ("/generate", {"text": LINE}),
        ("/v1/embeddings", {"input": LINE}),
    ],
)
def test_without_when_no_line_of_the_system_matches_then_the_body_is_as_it_was(path, sent):
    body = json.dumps(sent, indent=3).encode()
    assert dropped(path, body) == (body, 0)


def test_without_when_a_line_is_very_long_then_it_is_not_looked_at():
    body = json.dumps({"messages": [system("a" * (MOST_CHARACTERS + 1))]}).encode()
    assert dropped(CHAT, body, "^a+$") == (body, 0)


def test_without_when_a_line_goes_then_all_else_is_byte_for_byte():
    rest = b'"odd": 1.50, "big": 123456789012345678901234567890, "said": "caf\\u00e9"'
    turn = b'{"role" : "user","content":"caf\xc3\xa9"}'
    system_turn = json.dumps(system(f"{LINE}\nrules")).encode()
    body, _ = dropped(CHAT, b'{%b, "messages": [%b, %b]}' % (rest, system_turn, turn))
    assert turn in body
    for value in (b"1.50", b"123456789012345678901234567890", b'"caf\\u00e9"'):
        assert value in body


anything = st.recursive(
    st.text(max_size=8), lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner)
)
bodies = st.binary(max_size=80) | anything.map(lambda value: json.dumps({"messages": value, "system": value}).encode())


@given(bodies)
def test_without_when_bodies_are_any_then_nothing_is_raised(body):
    for path in (CHAT, MESSAGES, RESPONSES, "/api/chat"):
        assert isinstance(dropped(path, body, "a")[0], bytes)


@pytest.mark.parametrize("large", [0, 300_000])
def test_router_when_it_drops_lines_then_the_server_sees_none_and_they_are_counted(large):
    async def scenario():
        settings = {"drop_line": PATTERN}
        async with running([FakeServer("a")], **settings) as rig:
            sent = {"messages": [system(f"{LINE}\nrules"), system("u" * large, "user")]}
            async with rig.client.post(f"{rig.served.url}{CHAT}", json=sent) as response:
                assert response.status == 200
            assert json.loads(rig.servers[0].seen[0][0])["messages"][0] == system("rules")
            async with rig.client.get(f"{rig.served.url}/metrics") as response:
                assert "banyan_router_dropped_lines_total 1.0" in await response.text()

    asyncio.run(scenario())


def test_settings_when_the_expression_is_none_then_it_is_said_at_the_start():
    with pytest.raises(ValueError, match=r"--drop-line \(: no regular expression: missing \)"):
        Settings(servers=("http://a",), drop_line="(")
