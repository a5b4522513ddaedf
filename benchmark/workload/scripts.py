# SPDX-License-Identifier: Apache-2.0
"""From conversations to scripts of requests: which ones qualify, how long they answer, in which order they
run."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from benchmark.workload.conversation import ChatTokenizer, Conversation, Message, Script, Step

MIN_TOKENS = 4


@dataclass(frozen=True)
class ScriptLimits:
    """What qualifies a conversation and how much of it is used.

    `history_turns` counts messages, as the ShareGPT benchmarks of serving engines do: the context of a
    `history` request, or the messages of a conversation that a `session` plays.
    """

    num_prompts: int
    history_turns: int = 6
    max_total_tokens: int = 8192
    output_len: int = 32


def history_scripts(
    conversations: Iterable[Conversation],
    tokenizer: ChatTokenizer,
    limits: ScriptLimits,
    *,
    system_prompt: str = "",
) -> list[Script]:
    """One request per conversation: up to `history_turns` messages before the last answer are its context."""
    made = (_history_script(conversation, tokenizer, limits, system_prompt) for conversation in conversations)
    return _first_that_fit(made, limits.num_prompts)


def session_scripts(
    conversations: Iterable[Conversation],
    tokenizer: ChatTokenizer,
    limits: ScriptLimits,
    *,
    system_prompt: str = "",
) -> list[Script]:
    """Every user turn is a request; the answers in the context are the model's own."""
    made = (_session_script(conversation, tokenizer, limits, system_prompt) for conversation in conversations)
    return _first_that_fit(made, limits.num_prompts)


def _first_that_fit(made: Iterable[Script | None], num_prompts: int) -> list[Script]:
    """The first `num_prompts` scripts; conversations behind them are not even looked at."""
    return list(islice((script for script in made if script is not None), num_prompts))


def order_of_run(scripts: Sequence[Script], *, seed: int, run: int) -> list[int]:
    """Indexes of `scripts` in the order of run `run` (1, 2, ...): run 1 in the given order, later ones
    shuffled.

    With the same order twice, round robin over an even number of ranks would send every request to the rank
    that served it before, and the effect of sharing would vanish. One shuffle by itself would leave the share of
    requests that change their rank to chance, which decides what a server without sharing finds. So shuffles are drawn
    until `num_changing` scripts have a place of the other parity, as between two ranks.
    """
    order = list(range(len(scripts)))
    if run == 1 or len(order) < 2:
        return order
    rng = random.Random(f"{seed}/run-{run}")
    while True:
        rng.shuffle(order)
        if sum((place - script) % 2 for place, script in enumerate(order)) == num_changing(len(order)):
            return order


def num_changing(num_scripts: int) -> int:
    """How many of two or more scripts get a place of the other parity: half of them. No order has an odd number of
    these, so it is the next even number, of two the lower one: what sharing gains is not made larger."""
    return 2 * max(1, (num_scripts + 1) // 4)


def _history_script(
    conversation: Conversation, tokenizer: ChatTokenizer, limits: ScriptLimits, system_prompt: str
) -> Script | None:
    messages = conversation.messages
    answers = [index for index, message in enumerate(messages) if message.role == "assistant" and index > 0]
    if not answers:
        return None
    target = answers[-1]
    context = messages[max(0, target - limits.history_turns) : target]
    # A window may open in the middle of an exchange; a chat that begins with an answer fits no template well.
    while context and context[0].role == "assistant":
        context = context[1:]
    if not context:
        return None
    output_len = min(tokenizer.num_tokens(messages[target].content), limits.output_len)
    context = _system(system_prompt) + context
    prompt_len = len(tokenizer.chat_ids(context))
    if min(prompt_len, output_len) < MIN_TOKENS or prompt_len + output_len >= limits.max_total_tokens:
        return None
    return Script(id=conversation.id, steps=(Step(context, output_len),), prompt_len=prompt_len)


def _session_script(
    conversation: Conversation, tokenizer: ChatTokenizer, limits: ScriptLimits, system_prompt: str
) -> Script | None:
    steps: list[Step] = []
    pending: tuple[Message, ...] = _system(system_prompt)
    total_tokens = len(tokenizer.chat_ids(pending)) if pending else 0
    for index, message in enumerate(conversation.messages[: limits.history_turns]):
        if message.role == "assistant":
            continue
        pending = (*pending, message)
        total_tokens += tokenizer.num_tokens(message.content)
        if message.role != "user":
            continue
        output_len = _reference_len(conversation.messages, index + 1, tokenizer, limits.output_len)
        total_tokens += output_len
        if total_tokens >= limits.max_total_tokens:
            break
        steps.append(Step(pending, output_len))
        pending = ()
    if not steps:
        return None
    prompt_len = len(tokenizer.chat_ids(steps[0].messages))
    return Script(id=conversation.id, steps=tuple(steps), prompt_len=prompt_len)


def _reference_len(messages: Sequence[Message], index: int, tokenizer: ChatTokenizer, cap: int) -> int:
    """Tokens of the recorded answer at `index`, at most `cap`; a turn nobody answered gets `cap`."""
    if index >= len(messages) or messages[index].role != "assistant":
        return cap
    return max(1, min(tokenizer.num_tokens(messages[index].content), cap))


def _system(prompt: str) -> tuple[Message, ...]:
    return (Message("system", prompt),) if prompt else ()
