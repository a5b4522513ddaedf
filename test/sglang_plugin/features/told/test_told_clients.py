# SPDX-License-Identifier: Apache-2.0
"""What clients tell the cache, in the process that they reach: what goes to the ranks, and what is answered."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import DumperControlReqOutput
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins import load_plugins
from test.sglang_plugin.rank.hooked import hooked

from banyan import faults
from banyan.config import Config
from banyan.features.told.command import MAX_TEXT, Command
from banyan.features.told.launcher import hints, route, telling_ranks
from banyan.features.told.launcher.telling_ranks import Busy, Unanswered
from banyan.features.told.table import Refused
from banyan.patches import load_queue
from banyan.routing.cache_path import CACHE_PATH
from banyan.routing.conversation import name_of
from banyan.routing.headers import TENANT_HEADER
from banyan.routing.tenant_secret import TenantSecret
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import adapters, rerun, tenant_salts
from banyan.sglang_plugin.prompt_refusals import BadRequest

TOKENIZE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request"
ABORT = "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request"
MESSAGES = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing.handle_messages"


class Sglang:
    """The process that clients reach, with ranks that answer as ``refuses`` has it, one each."""

    def __init__(self):
        self.model_config = SimpleNamespace(vocab_size=1000)
        self.context_len = 4096
        self.tokenizer = SimpleNamespace(encode=self.encode)
        self.refuses, self.told = ["", ""], []
        self.rid_to_state, self.enable_metrics, self.sent = {}, False, []

    def encode(self, text):
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise TypeError("TextEncodeInput must be Union[...]")
        return list(text.encode())

    def auto_create_handle_loop(self):
        pass

    def _dispatch_to_scheduler(self, sent):
        self.sent.append(sent)

    def abort_request(self, rid):
        TokenizerManager.abort_request(self, rid)

    async def tell(self, command):
        return await telling_ranks.tell(self, command, telling_ranks.deadline_s(telling_ranks.TIMEOUT_S))

    async def dumper_control(self, asked):
        self.told.append(msgspec.to_builtins(Command.of_passed_on(asked.body)))
        return [
            DumperControlReqOutput(success=not line, response=[] if line else [{"num_pages": 1}], error=line)
            for line in self.refuses
        ]


@pytest.fixture(autouse=True)
def hooks_in_place():
    """On SGLang's classes, as in each process that a client reaches, whichever tests ran before; none of them fails."""
    load_plugins()
    before = faults.counts()
    yield
    assert faults.counts() == before


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    monkeypatch.setattr(runtime, "config", Config)
    monkeypatch.setattr(adapters, "named_by", lambda extra_key, manager: extra_key == "adapter")
    made = Sglang()
    monkeypatch.setattr(http_server, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=made))
    return made


async def nothing():
    pass


def of_told(target, original):
    return hooked(target, original, [patch for patch in load_queue() if patch.feature == "told"])


def hinted(*actions):
    listed = [
        {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}
        for kind, version, payload in actions
    ]
    envelope = {"protocol_version": "1", "message_id": "m", "actions": listed}
    return SimpleNamespace(kv_hints=decode_kv_hints_envelope(envelope) if actions else None, rid="r")


async def tokenize(manager, obj, **more):
    fields = {"input_ids": [1, 2, 3], "cache_salt": "s", "extra_key": None, "mm_inputs": None, "lora_id": None}
    return SimpleNamespace(**fields | more)


def ask(manager, *actions, meanwhile=nothing, **more):
    """A request with these actions comes."""

    async def run():
        other = asyncio.ensure_future(meanwhile())
        tokenized = await hooked(TOKENIZE, partial(tokenize, **more))(manager, hinted(*actions))
        assert tokenized.input_ids == [1, 2, 3]
        await other
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())


def test_action_when_it_names_no_prompt_then_it_is_of_the_requests_own_and_always_of_its_tenant(manager):
    ask(manager, ("pin", "1", {"ttl_s": 60}), ("prefetch", "1", {"input_ids": [7, 8]}), session_id="talk")
    pin, prefetch = manager.told
    assert (pin["action"], pin["input_ids"], pin["ttl_s"], pin["cache_salt"]) == ("pin", [1, 2, 3], 60, "s")
    assert (prefetch["action"], prefetch["input_ids"], prefetch["cache_salt"]) == ("prefetch", [7, 8], "s")
    assert pin["session"] == name_of("talk")


def test_action_when_it_is_not_known_or_of_another_version_or_nothing_is_shared_then_passed_over(manager, monkeypatch):
    ask(manager, ("pin", "2", {}), ("someone.pins", "1", {}), ("list", "1", {}))
    monkeypatch.setattr(runtime, "is_sharing", lambda: False)
    ask(manager, ("pin", "1", {}))
    assert manager.told == []


@pytest.mark.parametrize(
    "payload",
    [{"ttl_s": "x"}, {"ttl_s": 0}, {"input_ids": [5000]}, {"input_ids": 5}, {"input_ids": []}, {"cache_salt": "other"}],
)
def test_action_when_malformed_then_400_and_no_rank_hears_of_it(manager, payload):
    with pytest.raises(BadRequest, match="kv_hints: pin: "):
        ask(manager, ("pin", "1", payload))
    assert manager.told == []


@pytest.mark.parametrize(
    "more",
    [
        {"lora_id": "x"},
        {"mm_inputs": object()},
        {"session_params": SimpleNamespace(id="talk", rid=None)},
        {"positional_embed_overrides": object()},
    ],
)
def test_pin_when_its_prompt_is_more_than_tokens_then_400(manager, more):
    with pytest.raises(BadRequest, match="not known by its tokens"):
        ask(manager, ("pin", "1", {}), **more)
    assert manager.told == []


def test_pin_when_a_turn_of_a_session_names_its_tokens_then_it_is_kept_for_the_session(manager):
    ask(manager, ("pin", "1", {"input_ids": [7, 8]}), session_params=SimpleNamespace(id="talk", rid="turn 1"))
    (pin,) = manager.told
    assert (pin["input_ids"], pin["session"]) == ([7, 8], name_of("talk"))


def test_pin_when_one_rank_alone_refuses_then_400_with_its_line_and_the_others_take_it_back(manager):
    manager.refuses = ["", "over the budget"]
    with pytest.raises(BadRequest, match=r"^kv_hints: pin: over the budget$"):
        ask(manager, ("pin", "1", {}))
    told, taken_back = manager.told
    assert (told["action"], taken_back["action"]) == ("pin", "release") and taken_back["takes_back"] == told["name"]


def test_retain_when_one_rank_alone_refuses_then_the_others_take_it_back_and_the_request_goes_on(manager):
    manager.refuses = ["", "this rank has failed at it"]
    ask(manager, ("retain", "1", {}))
    told, taken_back = manager.told
    assert (told["action"], taken_back["action"]) == ("retain", "release") and taken_back["takes_back"] == told["name"]


@pytest.mark.parametrize("action", ["retain", "prefetch", "demote", "release"])
def test_action_when_it_is_no_pin_and_ranks_refuse_it_then_it_is_passed_over_and_counted(manager, monkeypatch, action):
    monkeypatch.setattr(telling_ranks, "_num_untold", 0)
    manager.refuses = ["there is no arena"] * 2
    ask(manager, (action, "1", {}), (action, "1", {}))
    manager.refuses = ["", ""]
    ask(manager, ("pin", "1", {}))
    assert [(body["action"], body["num_untold"]) for body in manager.told] == [(action, 0), (action, 1), ("pin", 1)]
    with pytest.raises(BadRequest, match=f"kv_hints: {action}: ttl_s"):
        ask(manager, (action, "1", {"ttl_s": 0}))


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_action_when_the_requests_salt_or_key_is_too_long_for_a_command_then_it_is_served_without_but_for_a_pin(
    manager, monkeypatch, field
):
    monkeypatch.setattr(telling_ranks, "_num_untold", 0)
    ask(manager, ("retain", "1", {}), ("prefetch", "1", {"input_ids": [7]}), **{field: "s" * (MAX_TEXT + 1)})
    assert manager.told == [] and telling_ranks._num_untold == 2
    with pytest.raises(BadRequest, match=r"^kv_hints: pin: .*1024"):
        ask(manager, ("pin", "1", {}), **{field: "s" * (MAX_TEXT + 1)})


def ranks_behind(manager, wait):
    """Ranks that answer each command behind ``wait``."""

    async def answer(asked):
        manager.told.append(asked.body)
        await wait()
        return [DumperControlReqOutput(success=True, response=[{"num_pages": 1}], error="")]

    return answer


def test_actions_when_ranks_are_in_a_long_step_then_a_request_waits_little_for_all_but_pins(manager, monkeypatch):
    monkeypatch.setattr(hints, "WISHES_WAIT_S", 0.02)
    monkeypatch.setattr(telling_ranks, "_num_untold", 0)
    answers = asyncio.Event()

    monkeypatch.setattr(manager, "dumper_control", ranks_behind(manager, answers.wait))

    async def step_ends():
        await asyncio.sleep(0.2)
        answers.set()

    wished = [(kind, "1", {"input_ids": [7]}) for kind in ("prefetch", "retain")]
    ask(manager, *wished, ("pin", "1", {}), meanwhile=step_ends)
    said = [(body["action"], body["num_untold"]) for body in manager.told]
    assert said == [("prefetch", 0), ("pin", 1)], "the first one was told"


def test_actions_when_each_takes_its_time_then_their_request_waits_no_longer_than_for_one(manager, monkeypatch):
    monkeypatch.setattr(telling_ranks, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(manager, "dumper_control", ranks_behind(manager, partial(asyncio.sleep, 0.08)))
    with pytest.raises(BadRequest, match=r"^kv_hints: pin: the ranks have not answered within"):
        ask(manager, *[("pin", "1", {"input_ids": [number]}) for number in range(1, 11)])
    assert len(manager.told) < 5


def test_actions_when_their_request_has_many_prompts_then_it_waits_no_longer_than_for_one_and_the_next_waits_anew(
    manager, monkeypatch
):
    monkeypatch.setattr(telling_ranks, "TIMEOUT_S", 0.4)
    monkeypatch.setattr(manager, "dumper_control", ranks_behind(manager, partial(asyncio.sleep, 0.1)))

    async def request(num_prompts):
        rerun.UNDER_WAY.set(object())
        for _ in range(num_prompts):
            yield await of_told(TOKENIZE, tokenize)(manager, hinted(("pin", "1", {})))

    async def run():
        with pytest.raises(BadRequest, match="have not answered within"):
            _ = [tokenized async for tokenized in request(30)]
        assert 1 < len(manager.told) < 10
        assert len([tokenized async for tokenized in request(1)]) == 1

    asyncio.run(run())


@pytest.mark.parametrize("is_sent", [True, False], ids=["the request is sent", "it fails before"])
@pytest.mark.parametrize("meant", [{"rid": "r"}, {"abort_all": True}], ids=["it", "all"])
def test_request_when_it_is_aborted_while_ranks_are_told_then_the_abort_is_sent_behind_it(
    manager, monkeypatch, is_sent, meant
):
    monkeypatch.setattr(hints, "ABORT_LOOK_PERIOD_S", 0.001)
    manager.rid_to_state["r"] = state = SimpleNamespace(dispatched=False, abort_sent=False)

    async def aborted(asked):
        hooked(ABORT, TokenizerManager.abort_request)(manager, **meant)
        return [DumperControlReqOutput(success=True, response=[{"num_pages": 1}], error="")]

    monkeypatch.setattr(manager, "dumper_control", aborted)

    async def run():
        await hooked(TOKENIZE, tokenize)(manager, hinted(("pin", "1", {})))
        await asyncio.sleep(0.01)
        assert [one.rid for one in manager.sent] == [meant.get("rid", "")], "to ranks that do not know it"
        state.dispatched = is_sent
        if not is_sent:
            del manager.rid_to_state["r"]
        await asyncio.sleep(0.05)

    asyncio.run(run())
    assert [one.rid for one in manager.sent[1:]] == ["r"] * is_sent and state.abort_sent


def test_request_when_all_are_aborted_before_or_behind_it_then_it_goes_on(manager):
    manager.rid_to_state["r"] = state = SimpleNamespace(dispatched=False, abort_sent=False)

    async def run():
        for _ in range(2):
            hooked(ABORT, TokenizerManager.abort_request)(manager, abort_all=True)
            await hooked(TOKENIZE, tokenize)(manager, hinted(("pin", "1", {})))

    asyncio.run(run())
    assert len(manager.sent) == 2 and not state.abort_sent


async def all_that_can_run():
    """Goes on; how long that takes does not matter."""
    for _ in range(100):
        await asyncio.sleep(0)


class SlowSglang(Sglang):
    """Its ranks answer when ``answer`` is called, as SGLang hands their answers on."""

    def __init__(self):
        super().__init__()
        self.communicator = FanOutCommunicator(self.told.append, fan_out=1)

    async def dumper_control(self, asked):
        return await self.communicator(asked.body)

    async def answer(self, name):
        self.communicator.handle_recv(DumperControlReqOutput(success=True, response=[{"of": name}]))
        await all_that_can_run()

    def begin(self, salt, tell=None):
        command = Command.of({"action": "list", "input_ids": [1], "cache_salt": salt})
        return asyncio.ensure_future((tell or self.tell)(command))

    def wish(self, salt):
        return self.begin(salt, partial(telling_ranks.wish, self))


def test_prefetch_when_a_rank_has_not_heard_of_all_pages_then_the_answer_is_of_one_that_has():
    class BehindWithNews(Sglang):
        async def dumper_control(self, asked):
            found = [{"num_pages": 3, "num_pages_found": num_pages} for num_pages in (1, 3, 2)]
            return [DumperControlReqOutput(success=True, response=[said]) for said in found]

    told = BehindWithNews().tell(Command.of({"action": "prefetch", "input_ids": [1]}))
    assert asyncio.run(told) == {"num_pages": 3, "num_pages_found": 3}


class SomeStopped(Sglang):
    """Its ranks answer ``said``, each what is there."""

    def __init__(self, *said):
        super().__init__()
        self.said = said

    async def dumper_control(self, asked):
        self.told.append(asked.body)
        return [DumperControlReqOutput(success=True, response=[one]) for one in self.said]


@pytest.mark.parametrize("action", ["pin", "retain", "release", "prefetch", "demote"])
def test_command_when_one_rank_has_stopped_to_share_then_the_others_answer_and_nothing_is_taken_back(action):
    sglang = SomeStopped({}, {"num_pages": 3}, {})
    assert asyncio.run(sglang.tell(Command.of({"action": action, "input_ids": [1]}))) == {"num_pages": 3}
    assert len(sglang.told) == 1


def test_command_when_no_rank_shares_any_more_then_refused():
    with pytest.raises(Refused, match="no rank of this server shares"):
        asyncio.run(SomeStopped({}, {}).tell(Command.of({"action": "pin", "input_ids": [1]})))


def test_command_when_its_client_leaves_then_its_answer_does_not_go_to_the_next_one():
    async def run():
        sglang = SlowSglang()
        gone = sglang.begin("a")
        await all_that_can_run()
        gone.cancel()
        other = sglang.begin("b")
        await all_that_can_run()
        await sglang.answer("a")
        assert not other.done() and [body["cache_salt"] for body in sglang.told] == ["a", "b"]
        await sglang.answer("b")
        assert await other == {"of": "b"}

    asyncio.run(run())


def test_command_when_its_client_leaves_while_it_waits_for_its_turn_then_no_rank_hears_of_it():
    async def run():
        sglang = SlowSglang()
        first, waiting, last = sglang.begin("a"), sglang.begin("b"), sglang.begin("c")
        await all_that_can_run()
        waiting.cancel()
        await sglang.answer("a")
        await sglang.answer("c")
        assert (await first, await last) == ({"of": "a"}, {"of": "c"})
        assert [body["cache_salt"] for body in sglang.told] == ["a", "c"]

    asyncio.run(run())


def test_command_when_a_rank_never_answers_then_everybody_is_told_so_in_time(monkeypatch):
    monkeypatch.setattr(telling_ranks, "TIMEOUT_S", 0.02)

    async def run():
        sglang = SlowSglang()
        told, untold = await asyncio.gather(sglang.begin("a"), sglang.begin("b"), return_exceptions=True)
        assert isinstance(told, Unanswered) and "have not answered within 0.02 s, and may still" in str(told)
        assert type(untold) is Refused and "was not told" in str(untold)
        assert len(sglang.told) == 1

    asyncio.run(run())


def test_wish_when_it_was_told_and_ranks_do_not_answer_then_it_is_not_counted_as_untold(monkeypatch):
    monkeypatch.setattr(telling_ranks, "TIMEOUT_S", 0.02)
    monkeypatch.setattr(telling_ranks, "_num_untold", 0)

    async def run():
        sglang = SlowSglang()
        await asyncio.gather(sglang.wish("a"), sglang.wish("b"))
        assert len(sglang.told) == telling_ranks._num_untold == 1

    asyncio.run(run())


def test_command_when_one_tenant_has_many_then_another_ones_waits_for_one_of_them():
    async def run():
        sglang = SlowSglang()
        first = [sglang.begin("many") for _ in range(3)]
        await all_that_can_run()
        other = sglang.begin("other")
        await all_that_can_run()
        for name in ("many", "other", "many", "many"):
            await sglang.answer(name)
        assert await other == {"of": "other"}
        await asyncio.gather(*first)
        assert [body["cache_salt"] for body in sglang.told] == ["many", "other", "many", "many"]

    asyncio.run(run())


def test_wish_when_another_tenant_has_many_commands_then_it_waits_for_one_of_them():
    async def run():
        sglang = SlowSglang()
        first = [*[sglang.begin("many") for _ in range(3)], sglang.wish("many")]
        await all_that_can_run()
        other = sglang.wish("other")
        await all_that_can_run()
        await sglang.answer("many")
        await sglang.answer("other")
        assert other.done() and [body["cache_salt"] for body in sglang.told] == ["many", "other", "many"]
        for _ in range(3):
            await sglang.answer("many")
        await asyncio.gather(*first)

    asyncio.run(run())


def test_command_when_too_many_wait_then_it_is_refused_at_once_and_those_go_on(monkeypatch):
    monkeypatch.setattr(telling_ranks, "MOST_WAITING", 4)

    async def run():
        sglang = SlowSglang()
        waiting = [sglang.begin(salt) for salt in "aab"]
        await all_that_can_run()
        with pytest.raises(Busy, match=r"^3 commands wait for the ranks, 2 of this tenant's"):
            await sglang.begin("a")
        waiting.append(sglang.begin("c"))
        await all_that_can_run()
        with pytest.raises(Busy, match=r"^4 commands wait"):
            await sglang.begin("d")
        for name in "abca":
            await sglang.answer(name)
        assert [answer["of"] for answer in await asyncio.gather(*waiting)] == ["a", "a", "b", "c"]
        assert not telling_ranks._waiting and not telling_ranks._turns_of_tenants

    asyncio.run(run())


def test_command_when_many_wishes_of_its_tenant_were_first_then_it_waits_for_one_of_them():
    async def run():
        sglang = SlowSglang()
        wishes = [sglang.wish("a") for _ in range(3)]
        await all_that_can_run()
        asked = sglang.begin("a")
        for name in ("wish", "somebody waits", "wish", "wish"):
            await sglang.answer(name)
        assert await asked == {"of": "somebody waits"}
        await asyncio.gather(*wishes)

    asyncio.run(run())


@pytest.mark.parametrize("refusal", ["", "over the budget"])
def test_messages_when_cache_control_names_a_time_then_the_prompt_is_retained_and_never_refused(manager, refusal):
    manager.refuses = [refusal]
    fields = {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}

    async def handled(serving, request, raw_request):
        tokenized = SimpleNamespace(input_ids=[1, 2], cache_salt=None, extra_key=None, mm_inputs=None, lora_id=None)

        async def original(manager, obj):
            return tokenized

        await hooked(TOKENIZE, original)(manager, SimpleNamespace(kv_hints=None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def json():
        return fields

    asyncio.run(hooked(MESSAGES, handled)(None, None, SimpleNamespace(json=json)))
    (told,) = manager.told
    assert (told["action"], told["ttl_s"], told["input_ids"]) == ("retain", 3600.0, [1, 2])
    ask(manager)
    assert len(manager.told) == 1, "of this request alone"


def test_wishes_when_there_are_too_many_under_way_then_what_comes_on_top_is_counted_and_the_next_says_so(
    manager, monkeypatch
):
    monkeypatch.setattr(hints, "MOST_WISHES", 0)
    monkeypatch.setattr(telling_ranks, "_num_untold", 0)
    hints._ttl_s.set(300.0)
    try:
        with monkeypatch.context() as overloaded:
            overloaded.setattr(hints, "_command", lambda *said: pytest.fail("tokens are copied for nobody"))
            ask(manager)
            ask(manager)
        assert manager.told == []
        monkeypatch.setattr(hints, "MOST_WISHES", 2)
        ask(manager)
        ask(manager)
    finally:
        hints._ttl_s.set(None)
    assert [body["num_untold"] for body in manager.told] == [2, 0]
    assert len({body["name"] for body in manager.told} - {""}) == 2


def test_wish_when_it_cannot_be_a_command_then_it_is_counted(manager, monkeypatch):
    monkeypatch.setattr(telling_ranks, "_num_untold", 0)
    hints._ttl_s.set(300.0)
    try:
        ask(manager, extra_key="x" * 2000)
        ask(manager)
    finally:
        hints._ttl_s.set(None)
    assert [body["num_untold"] for body in manager.told] == [1]


def test_wishes_when_a_tenant_has_half_of_them_under_way_then_another_ones_are_told(monkeypatch, manager):
    monkeypatch.setattr(hints, "MOST_WISHES", 4)
    monkeypatch.setattr(manager, "dumper_control", ranks_behind(manager, all_that_can_run))

    async def run():
        hints._ttl_s.set(300.0)
        for salt in "aaaab":
            await hooked(TOKENIZE, partial(tokenize, cache_salt=salt))(manager, hinted())
        await asyncio.gather(*hints._wishes)

    asyncio.run(run())
    assert sorted(body["cache_salt"] for body in manager.told) == ["a", "a", "b"] and not hints._wishes


def post(body, headers=None):
    app = FastAPI()
    route.add_to(app)
    route.add_to(app)

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            sent = {"content": body} if isinstance(body, bytes) else {"json": body}
            return await client.post(CACHE_PATH, headers=headers, **sent)

    return asyncio.run(run())


def test_path_when_a_prompt_is_text_or_tokens_then_the_ranks_are_told_its_tokens(manager):
    answer = post({"action": "pin", "text": "ab", "ttl_s": 9, "cache_salt": "t"})
    assert (answer.status_code, answer.json()) == (200, {"action": "pin", "num_pages": 1})
    assert post({"action": "release", "input_ids": [5]}).status_code == post({"action": "list"}).status_code == 200
    assert [body["input_ids"] for body in manager.told] == [[97, 98], [5], []]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        [],
        {},
        {"action": "pin"},
        {"action": "pin", "text": 5},
        b'{"action": "pin", "text": "\\ud800"}',
        {"action": "release", "input_ids": [1], "takes_back": "pin"},
        {"action": "pin", "text": "a", "input_ids": [1]},
        {"action": "pin", "input_ids": [1000]},
        {"action": "demote", "input_ids": [1] * 4097},
        {"action": "pin", "input_ids": [1], "session": "x"},
        {"action": "pin", "input_ids": [1], "extra_key": "adapter"},
    ],
)
def test_path_when_what_is_said_is_malformed_then_400_and_no_rank_hears_of_it(manager, body):
    answer = post(body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert manager.told == []


def test_path_when_a_rank_refuses_or_nothing_is_shared_then_409_with_the_line(manager, monkeypatch):
    manager.refuses = ["over the budget", ""]
    answer = post({"action": "pin", "input_ids": [1]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (409, "over the budget")
    monkeypatch.setattr(runtime, "is_sharing", lambda: False)
    assert post({"action": "list"}).status_code == 409


def test_path_when_too_many_commands_wait_then_503_with_a_line(manager, monkeypatch):
    monkeypatch.setattr(telling_ranks, "MOST_WAITING", 0)
    answer = post({"action": "list"})
    assert answer.status_code == 503 and "commands wait" in answer.json()["error"]["message"]


def test_path_when_the_server_has_tenants_then_only_by_their_router_and_in_front_of_any_salt(
    manager, monkeypatch, tmp_path
):
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    secret.chmod(0o600)
    monkeypatch.setattr(runtime, "config", lambda: Config(tenant_secret_file=str(secret)))
    tenant_salts._tenant_secret.cache_clear()
    asked = {"action": "pin", "input_ids": [1], "cache_salt": "mine"}
    assert post(asked).status_code == 400 and manager.told == []
    said_with = TenantSecret(secret.read_bytes())
    salt = said_with.salt_of("tenant", "acme")
    headers = {TENANT_HEADER: said_with.word(salt)}
    assert post(asked, headers).status_code == post({"action": "list"}, headers).status_code == 200
    assert [body["cache_salt"] for body in manager.told] == [salt + "mine", salt]
    monkeypatch.setattr(manager, "dumper_control", lambda asked: pytest.fail("ranks hear of it"))
    answer = post({**asked, "cache_salt": "m" * (MAX_TEXT - len(salt) + 1)}, headers)
    assert answer.status_code == 400 and "cache_salt" in answer.json()["error"]["message"]
