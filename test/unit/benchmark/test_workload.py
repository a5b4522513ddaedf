# SPDX-License-Identifier: Apache-2.0
import gzip
import itertools
import json
import random
from pathlib import Path

import pytest
from bench_fakes import WordTokenizer, chat

from benchmark.workload.generated import ChatShape, generate_conversations
from benchmark.workload.scripts import ScriptLimits, history_scripts, order_of_run, session_scripts
from benchmark.workload.sharegpt import DatasetError, load_conversations, openings

ENTRIES = [
    {"id": "x_0", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    {"id": "x_2", "conversations": [{"from": "gpt", "value": "more"}, {"from": "tool", "value": "dropped"}]},
    {"id": 3, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]},
    {"id": "empty", "conversations": []},
    "noise",
]
TEN = "one two three four five six seven eight nine ten"


@pytest.mark.parametrize("form", ["list", "lines", "gz"])
def test_load_when_list_lines_or_gzip_then_the_same_conversations(tmp_path: Path, form: str) -> None:
    lines = "\n".join(json.dumps(entry) for entry in ENTRIES) + "\n\n"
    path = tmp_path / "data"
    data = json.dumps(ENTRIES).encode() if form == "list" else lines.encode()
    path.write_bytes(gzip.compress(data) if form == "gz" else data)
    conversations = load_conversations(path)
    assert [conversation.id for conversation in conversations] == ["x_0", "x_2", "3"]
    assert [message.role for message in conversations[0].messages] == ["user", "assistant"]
    assert len(conversations[1].messages) == len(conversations[2].messages) == 1
    assert [conversation.id for conversation in openings(conversations)] == ["x_0", "3"]


@pytest.mark.parametrize("data", [b"", b"[1, 2]", b"not json", b"[{", b"\x1f\x8bbroken", b'{"a": 1}'])
def test_load_when_not_a_sharegpt_file_then_the_error_names_it(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"data\.json"):
        load_conversations(path)


def test_load_when_missing_then_dataset_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError):
        load_conversations(tmp_path / "nowhere.json")


def test_load_when_a_folder_then_its_file_and_else_the_error_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="sharegpt"):
        load_conversations(tmp_path)
    (tmp_path / "chats").mkdir()
    entry = {"id": "a_0", "conversations": [{"from": "human", "value": "hi"}]}
    (tmp_path / "chats" / "ShareGPT_V3.json").write_text(json.dumps([entry]))
    (tmp_path / "other.json").write_text("[]")
    assert [conversation.id for conversation in load_conversations(tmp_path)] == ["a_0"]


def test_history_when_long_then_the_last_messages_before_the_last_answer() -> None:
    conversation = chat("a", *(f"{word} b c d e" for word in ("q1", "a1", "q2", "a2", "q3", "a3", "q4")))
    (script,) = history_scripts([conversation], WordTokenizer(), ScriptLimits(5, history_turns=4, output_len=3 + 1))
    (step,) = script.steps
    # a1 would come first of the four; a context does not begin with an answer.
    assert [message.content[:2] for message in step.messages] == ["q2", "a2", "q3"]
    assert step.output_len == 4
    assert script.prompt_len == 19


def test_history_when_unfit_then_dropped() -> None:
    limits = ScriptLimits(10, max_total_tokens=40)
    unfit = [
        chat("no answer", TEN),
        chat("only an answer", TEN, first="assistant"),
        chat("answer too short", TEN, "no"),
        chat("too long", " ".join([TEN] * 4), TEN),
    ]
    assert history_scripts([*unfit, chat("fit", TEN, TEN)], WordTokenizer(), limits)[0].id == "fit"


def test_history_when_enough_then_no_more_than_asked_and_system_prompt_first() -> None:
    chats = [chat(str(index), TEN, TEN) for index in range(5)]
    scripts = history_scripts(chats, WordTokenizer(), ScriptLimits(3), system_prompt="be kind")
    assert [script.id for script in scripts] == ["0", "1", "2"]
    assert scripts[0].steps[0].messages[0].role == "system"


def test_session_when_played_then_one_step_per_user_turn_within_the_limit() -> None:
    conversation = chat("a", TEN, TEN, TEN, "short", TEN, TEN)
    (script,) = session_scripts([conversation], WordTokenizer(), ScriptLimits(1, output_len=8))
    assert [step.output_len for step in script.steps] == [8, 1, 8]
    assert all([message.role for message in step.messages] == ["user"] for step in script.steps)
    (script,) = session_scripts([conversation], WordTokenizer(), ScriptLimits(1, output_len=8, max_total_tokens=35))
    assert len(script.steps) == 2
    (script,) = session_scripts([conversation], WordTokenizer(), ScriptLimits(1, history_turns=2))
    assert len(script.steps) == 1


@pytest.mark.parametrize("num_scripts", [2, 3, 24])
def test_order_when_second_run_then_another_permutation_of_the_same_set(num_scripts: int) -> None:
    chats = [chat(str(index), TEN, TEN) for index in range(num_scripts)]
    scripts = history_scripts(chats, WordTokenizer(), ScriptLimits(num_scripts))
    for seed in range(20):
        first, second = (order_of_run(scripts, seed=seed, run=run) for run in (1, 2))
        assert first == list(range(num_scripts))
        assert sorted(second) == first
        assert second != first
        assert second == order_of_run(scripts, seed=seed, run=2)


@pytest.mark.parametrize(
    ("num_scripts", "changing"), [(2, 2), (3, 2), (4, 2), (5, 2), (6, 2), (7, 4), (14, 6), (20, 10), (48, 24)]
)
def test_order_when_two_ranks_take_turns_then_half_of_the_scripts_change_their_rank(
    num_scripts: int, changing: int
) -> None:
    chats = [chat(str(index), TEN, TEN) for index in range(num_scripts)]
    scripts = history_scripts(chats, WordTokenizer(), ScriptLimits(num_scripts))
    for seed, run in itertools.product(range(10), (2, 3)):
        order = order_of_run(scripts, seed=seed, run=run)
        assert sum((place - script) % 2 for place, script in enumerate(order)) == changing


def test_order_when_the_first_shuffle_moves_half_then_it_is_taken() -> None:
    """The kept run of `make bench` has 48 conversations and seed 0."""
    chats = [chat(str(index), TEN, TEN) for index in range(48)]
    shuffled = list(range(48))
    random.Random("0/run-2").shuffle(shuffled)
    scripts = history_scripts(chats, WordTokenizer(), ScriptLimits(48))
    assert order_of_run(scripts, seed=0, run=2) == shuffled


def test_generated_when_same_seed_then_same_chats_whatever_their_number() -> None:
    few, many = generate_conversations(2, seed=7), generate_conversations(9, seed=7)
    assert few == many[:2]
    assert generate_conversations(2, seed=8) != few
    assert len({chat.messages[0].content[:40] for chat in many}) == 9


def test_generated_when_many_then_mean_lengths_are_those_asked_for() -> None:
    shape = ChatShape(num_turns=2, mean_question_words=50, mean_answer_words=150)
    chats = generate_conversations(200, seed=1, shape=shape)
    lengths = [[len(message.content.split()) for message in chat.messages] for chat in chats]
    questions = [length for chat_lengths in lengths for length in chat_lengths[::2]]
    answers = [length for chat_lengths in lengths for length in chat_lengths[1::2]]
    assert sum(questions) / len(questions) == pytest.approx(50, rel=0.1)
    assert sum(answers) / len(answers) == pytest.approx(150, rel=0.1)
