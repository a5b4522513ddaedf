# SPDX-License-Identifier: Apache-2.0
"""The picture of a request's time. Servers are started by `test/e2e`, not here."""

from xml.etree import ElementTree

from banyan_lab.trace.timeline import CLIENT, FIRST_TOKEN, Step, chrome_trace
from benchmark.request_trace import draw, prompt_of

MS = 1_000_000


def test_picture_when_drawn_then_it_has_each_server_and_each_track_and_is_the_same_again(tmp_path):
    steps = {CLIENT: [Step(FIRST_TOKEN, 0, 20 * MS)], "rank 1": [Step("prefill", 5 * MS, 15 * MS), Step("i", MS, MS)]}
    events = chrome_trace({"http://a (Banyan)": steps, "http://b (no sharing)": steps}, {})["traceEvents"]
    draw(events, tmp_path / "a.svg")
    draw(events, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for word in ("(Banyan)", "(no sharing)", "rank 1", "client", "milliseconds"):
        assert word in text


def test_prompt_when_made_then_it_has_so_many_words_and_another_seed_gives_another():
    assert len(prompt_of(50, 1).split()) == 50 and prompt_of(50, 1) == prompt_of(50, 1) != prompt_of(50, 2)
