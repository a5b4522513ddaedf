# SPDX-License-Identifier: Apache-2.0
"""What a client's value raises while SGLang makes a request of it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import AbortReq

from banyan.sglang_plugin.rank import refused_requests
from banyan.sglang_plugin.rank.refused_requests import around_handle_request


@pytest.fixture(autouse=True)
def serving(monkeypatch):
    """What SGLang's processes serve by."""
    serving = SimpleNamespace(smg_grpc_mode=False)
    monkeypatch.setattr(refused_requests, "get_serving", lambda: serving)
    monkeypatch.setattr(refused_requests.runtime, "config", lambda: "on")
    return serving


def handled(error, ids=(1, 2), rid="r"):
    """What was told, and to whom, when SGLang's handler raises this."""
    told = []

    def tell(answer, asked):
        told.append((answer, asked))

    by_grpc = SimpleNamespace(send_to_detokenizer=SimpleNamespace(send_output=tell))
    scheduler = SimpleNamespace(
        **({"ipc_channels": by_grpc} if refused_requests.get_serving().smg_grpc_mode else {"send_abort_output": tell}),
        model_config=SimpleNamespace(vocab_size=320),
        weight_updater=SimpleNamespace(offload_tags=set()),
    )
    asked = SimpleNamespace(rid=rid, input_ids=ids, sampling_params=None)

    def original(*args, **named):
        assert args == (scheduler, asked, "cleanup") and named == {"mm_input_error": None}
        if error is not None:
            raise error

    around_handle_request(original, scheduler, asked, "cleanup", mm_input_error=None)
    return told, asked


@pytest.mark.parametrize("error", [ValueError("no such mode"), TypeError("x"), IndexError("y"), AssertionError("z")])
def test_request_when_sglang_cannot_make_it_then_its_client_is_told_and_the_rank_goes_on(error):
    ((answer, to),), asked = handled(error)
    assert isinstance(answer, AbortReq) and answer.rid == "r" and to is asked
    assert answer.finished_reason["status_code"] == 400 and str(error) in answer.finished_reason["message"]


def test_refusal_when_rid_and_value_are_long_and_have_lines_then_the_log_has_one_of_bounded_length(caplog):
    handled(ValueError("v\n" * 9999), rid="r\n" * 9999)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "banyan"]
    assert "\n" not in line and len(line) < 1300 and "'r\\nr" in line


def test_request_when_banyan_is_off_then_sglang_has_it_as_it_came(monkeypatch):
    monkeypatch.setattr(refused_requests.runtime, "config", lambda: None)
    with pytest.raises(ValueError, match="no such mode"):
        handled(ValueError("no such mode"))


def test_request_when_sglang_takes_it_then_nothing_is_told():
    assert handled(None)[0] == []


@pytest.mark.parametrize(
    ("turn", "turns", "is_refused"),
    [
        ({"replace": True, "rid": None}, {"r": object()}, True),
        ({"replace": True, "rid": None}, {}, False),
        ({"replace": True, "rid": "r"}, {"r": object()}, False),
        ({"replace": False, "rid": None}, {"r": object()}, False),
    ],
    ids=["all that there are", "none is there", "one", "none"],
)
def test_turn_when_it_replaces_all_of_a_session_then_refused(monkeypatch, turn, turns, is_refused):
    """SGLang ends while it clears them."""
    scheduler = SimpleNamespace(session_controller={"s": SimpleNamespace(req_nodes=turns)})
    asked = SimpleNamespace(session_params=SimpleNamespace(id="s", **turn))
    with pytest.raises(ValueError, match="replace needs the rid") if is_refused else nullcontext():
        refused_requests._check_turn(scheduler, asked)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), MemoryError(), OSError(5, "I/O"), KeyboardInterrupt()])
def test_request_when_the_machine_fails_then_it_is_raised_as_in_sglang(error):
    with pytest.raises(type(error)):
        handled(error)


def test_request_when_it_came_by_grpc_and_would_end_the_rank_then_its_client_is_told(serving):
    assert handled(None, ids=(1, 320))[0] == [], "checked in the main process"
    serving.smg_grpc_mode = True
    assert handled(None)[0] == []
    ((answer, _),), _ = handled(None, ids=(1, 320))
    assert "none of the model's 320 tokens" in answer.finished_reason["message"]


def test_request_when_memory_is_given_away_then_its_client_is_told_and_sglang_does_not_see_it(monkeypatch):
    monkeypatch.setattr(refused_requests.memory_commands, "is_out", lambda scheduler: True)
    ((answer, _),), _ = handled(KeyboardInterrupt())
    assert answer.finished_reason["status_code"] == 503 and "/resume_memory_occupation" in answer.abort_message
