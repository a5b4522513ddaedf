# SPDX-License-Identifier: Apache-2.0
"""The tree of shared prefixes: the last prompts of all ranks, laid over each other.

Ranks tell every n-th page key of a prompt, n a power of two that differs between prompts. Two prompts are compared at
the places where both have a mark; they part behind the last of these at which they agree. So a branch may begin up to
n pages later than it is drawn, and is never drawn where the prompts differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from banyan.observe.reading import Reading, SeenPrompt

MAX_LEVELS = 64
"""What parts deeper is left out: whoever makes the tree, and the text of it, goes down by calls."""


@dataclass(slots=True)
class Branch:
    """A stretch of tokens that all prompts below it have in common.

    Attributes:
        start_tokens, end_tokens: from the root.
        key: of its last page, shortened.
        num_prompts, num_turns: prompts that run through it, and their turns.
        pools, arena: how many of its tokens each rank's pool holds, and the arena.
        rids: the prompts that end here.
    """

    start_tokens: int
    end_tokens: int
    key: str
    num_prompts: int
    num_turns: int
    last_seen_s: float
    pools: list[int]
    arena: int
    rids: list[str] = field(default_factory=list)
    children: list[Branch] = field(default_factory=list)


def prefix_tree(reading: Reading) -> list[Branch]:
    """The branches that begin at the root, the one with the most turns first."""
    prompts = [prompt for rank in reading.ranks for prompt in rank.prompts]
    return _branches(sorted(prompts, key=lambda prompt: prompt.num_tokens), 0, MAX_LEVELS)


def _branches(prompts: Sequence[SeenPrompt], start: int, num_levels: int) -> list[Branch]:
    """Prompts that agree up to ``start``, as branches from there on, so many levels of them."""
    found = [_branch(group, start, num_levels) for group in _groups(prompts, start)]
    return sorted(found, key=lambda branch: (-branch.num_turns, branch.key))


def _groups(prompts: Iterable[SeenPrompt], start: int) -> list[list[SeenPrompt]]:
    """Those that go on alike behind ``start``: each agrees there with the first of its group."""
    groups: list[list[SeenPrompt]] = []
    found: dict[tuple[int, str], list[SeenPrompt]] = {}
    for prompt in prompts:
        marks = [mark for mark in prompt.marks.items() if mark[0] > start]
        group = next((found[mark] for mark in marks if mark in found), None)
        if group is None:
            group = []
            groups.append(group)
            found.update(dict.fromkeys(marks, group))
        group.append(prompt)
    return groups


def _common(one: SeenPrompt, other: SeenPrompt) -> int:
    """Tokens up to the last mark at which both prompts agree."""
    return next((tokens for tokens in reversed(one.marks) if other.marks.get(tokens) == one.marks[tokens]), 0)


def _branch(group: list[SeenPrompt], start: int, num_levels: int) -> Branch:
    first = group[0]
    end = min([first.num_tokens, *(_common(first, other) for other in group[1:])])
    branch = Branch(
        start_tokens=start,
        end_tokens=end,
        key=first.marks[end],
        num_prompts=len(group),
        num_turns=sum(prompt.num_turns for prompt in group),
        last_seen_s=max(prompt.seen_s for prompt in group),
        pools=[
            _within(max(held), start, end) for held in zip_longest(*(prompt.pools for prompt in group), fillvalue=0)
        ],
        arena=_within(max(prompt.arena for prompt in group), start, end),
        rids=[prompt.rid for prompt in group if prompt.num_tokens == end],
    )
    rest = [prompt for prompt in group if prompt.num_tokens > end]
    if rest and num_levels > 1:
        branch.children = _branches(rest, end, num_levels - 1)
    return branch


def _within(held: int, start: int, end: int) -> int:
    return max(0, min(held, end) - start)
