# SPDX-License-Identifier: Apache-2.0
import json
from array import array
from types import SimpleNamespace

import pytest

from banyan.sglang_plugin.rank.reporting.line_report import MOST_MARKS, LineReport
from banyan.telemetry import Counters, Parting
from banyan.telemetry.changing_lines import MOST_SHOWN


class Words:
    """A tokenizer of words; some are marks of a template."""

    all_special_ids = (1, 2)

    def __init__(self):
        self.added_tokens_decoder = {3: "<|im_end|>"}
        self.words = ["", "<|im_start|>", "<s>", "<|im_end|>"]

    def encode(self, text):
        pieces = text.replace("\n", " \n ").split(" ")
        for piece in pieces:
            if piece not in self.words:
                self.words.append(piece)
        return array("q", map(self.words.index, pieces))

    def decode(self, tokens):
        return " ".join(self.words[token] for token in tokens).replace(" \n ", "\n")


TOKENIZER = Words()
RULES = " ".join(f"rule{number}" for number in range(90))


def request(text, session="s", tokenizer=TOKENIZER, **fields):
    tokens = TOKENIZER.encode(text)
    return SimpleNamespace(banyan_session=session, origin_input_ids=tokens, banyan_tokenizer=tokenizer, **fields)


def chat(number, before="You are an agent.", role="system"):
    head = f"<|im_start|> {role} \n {before} \n stamp: {number} of today \n {RULES} <|im_end|>"
    return f"{head} \n <|im_start|> user \n hello"


def shown(report):
    (line,) = json.loads(json.dumps(report.state()))["changing_lines"]
    return line


def told(texts, *, tells_text=True):
    counters = Counters()
    report = LineReport(counters, 4, tells_text=tells_text)
    found = [report.saw(request(text)) for text in texts]
    return report, found, counters


def test_saw_when_prompts_part_at_an_image_then_what_stands_for_it_is_no_text_and_nothing_fails():
    report = LineReport(Counters(), 4, tells_text=True)
    for number in range(3):
        asked = request(chat(0))
        place = asked.origin_input_ids.index(TOKENIZER.words.index("0"))
        asked.origin_input_ids[place : place + 1] = array("q", [2**61 + number] * 8)
        report.saw(asked)
    line = shown(report)
    assert (line["part"], line["num_prompts"]) == ("system", 3) and line["text"].strip() == "stamp:of today"


def test_saw_when_a_line_changes_then_place_part_and_text_are_told_by_the_third_turn():
    report, found, counters = told([chat(number) for number in range(3)])
    assert found == [None, Parting(12, 2), Parting(12, 3)]
    assert shown(report) == {
        "place": 13,
        "num_prompts": 3,
        "num_tokens": len(TOKENIZER.encode(chat(2))),
        "part": "system",
        "text": " stamp:2 of today ",
    }
    assert (counters.parted_prompts, counters.changing_line_prompts) == (2, 1)


def test_saw_when_nobody_has_asked_for_text_then_there_is_none():
    report, _, _ = told([chat(number) for number in range(3)], tells_text=False)
    assert (shown(report)["text"], shown(report)["part"]) == ("", "system")


@pytest.mark.parametrize(
    ("chats", "part"),
    [
        ([chat(number, before="<tools> get_weather") for number in range(3)], "tools"),
        ([chat(number, role="user") for number in range(3)], "messages"),
        ([chat(number).replace("<|im_start|>", "begin") for number in range(3)], ""),
    ],
)
def test_saw_when_the_line_is_elsewhere_then_the_part_says_so(chats, part):
    report, _, _ = told(chats)
    assert shown(report)["part"] == part


def test_saw_when_a_request_is_of_no_session_then_nothing_is_known():
    report, found, counters = told([])
    assert report.saw(request(chat(0), session=None)) is None and report.saw(SimpleNamespace()) is None
    assert (found, counters.parted_prompts, report.state()["changing_lines"]) == ([], 0, [])


def test_saw_when_salts_differ_then_prompts_are_not_compared():
    report, _, counters = told([])
    for number in range(4):
        report.saw(request(chat(number), cache_salt=str(number)))
    assert counters.parted_prompts == 0


def test_saw_when_there_is_no_tokenizer_then_the_place_is_told_alone():
    report, _, _ = told([])
    for number in range(3):
        report.saw(request(chat(number), tokenizer=None))
    assert (shown(report)["place"], shown(report)["part"], shown(report)["text"]) == (13, "", "")


def test_state_when_sessions_are_many_then_the_last_places_are_shown():
    report, _, _ = told([])
    for place in range(20):
        for number in range(3):
            text = " ".join(f"w{word}" for word in range(100 * place)) + " " + chat(number)
            report.saw(request(text, session=str(place)))
    lines = report.state()["changing_lines"]
    assert len(lines) == MOST_SHOWN and lines[-1]["place"] > lines[0]["place"]


def test_saw_when_a_prompt_is_nothing_but_marks_then_few_of_them_are_decoded():
    """A client chooses the prompt, and the scheduler's thread decodes."""
    decoded = []

    class Counted(Words):
        def decode(self, tokens):
            decoded.append(tokens)
            return super().decode(tokens)

    tokenizer = Counted()
    tokenizer.words = TOKENIZER.words
    marks = " ".join(["<|im_end|>"] * 4000)
    report = LineReport(Counters(), 4, tells_text=False)
    for number in range(3):
        report.saw(request(f"{marks} stamp: {number} {RULES}", tokenizer=tokenizer))
    assert shown(report)["part"] == "" and 0 < len(decoded) <= MOST_MARKS + 1
