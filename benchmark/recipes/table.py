# SPDX-License-Identifier: Apache-2.0
"""``docs/recipes.md`` from what was found: counts, families, and what refuses: pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from benchmark.recipes import ways_out
from benchmark.recipes.lines import Line, Verdict

Found = Sequence[tuple[Line, Verdict]]

HEAD = """# Launch lines that people use

Made by `make recipes DATA=FOLDER` from published launch lines of SGLang with `--enable-banyan` added. Each line is a
dry run, as `banyan doctor -- ARGUMENTS` makes one, on a stand-in for the GPU that the line names, with the model's
configuration and no weights. *Shared*: the server would start with Banyan on. Most lines have one rank: there only the
host arena and a store help. A dry run says what the launcher decides: what ranks check when they start (their pools,
the driver) is not seen, and none of these lines has run on a GPU.

"""

WAYS_OUT = """\
Each refused line was judged again, by another dry run, with the first way out that its refusal names, taken to the
letter; where that was refused too, with the next one.

"""

REMAINING = """
## What the refused lines would take

- **No radix cache**: `--disable-radix-cache` is the user's own flag: there is no prefix to share.
- **DeepSeek-V4**: alone and with its own drafts it is shared. In prefill/decode pairs it takes what other models with
  windows take there: pages of two pools in one hand-over.
- **Inkling**: it has pages of three kinds: full ones, windows, and states of convolutions. Pools (`two_kinds`), rank
  table and arena count one kind beside the full pages.
- **DFLASH, DSPARK**: rows of the draft lie at the model's slots, and SGLang fills some a step late: pages may be
  offered only behind that. A draft with windows keeps them in a ring of each request, which no page has.
- **Pages of one token**: SGLang has another allocator for them, without pages; the quarantine and the index of pages
  would have to know slots. LFM2.5 needs them, too: SGLang keeps its states for such pages only.
- **Pipeline parallelism**: stages look up by themselves and step at different times. What the first one promises the
  others would have to lease before it computes.
- **Diffusion models**: a batch takes promised pages and never fetches them: a hook where such batches are made.
- **HiCache beside Banyan**: both would write and evict the tail of a prefix. The refusal names the flags by which
  Banyan's arena and store take its place.
"""


def page(found: Found, outs: Found, where: str) -> str:
    """The whole page. ``outs``: the refused lines with the ways out that were named. ``where``: commit, day and
    machine."""
    return HEAD + _counts(found, where) + _families(found) + _reasons(found) + _ways_out(outs) + REMAINING


def summary(found: Found) -> str:
    """In one line."""
    in_step = [one for one in found if one[0].is_in_step]
    crashed = sum(verdict.has_crashed for _, verdict in found)
    return f"{_share(found)} shared; with ranks in step (data-parallel attention) {_share(in_step)}; {crashed} crashed"


def _share(found: Found) -> str:
    return f"{sum(verdict.is_shared for _, verdict in found)} of {len(found)}"


def _counts(found: Found, where: str) -> str:
    return f"{summary(found)}.\n{where[0].upper()}{where[1:]}.\n\n"


def _families(found: Found) -> str:
    rows: dict[str, list[tuple[Line, Verdict]]] = defaultdict(list)
    for line, verdict in found:
        rows[line.family].append((line, verdict))
    text = "| family | lines | shared | what refuses the others | a line that is shared |\n|---|---|---|---|---|\n"
    for family, own in rows.items():
        shared = [line for line, verdict in own if verdict.is_shared]
        reasons = Counter(flag for _, verdict in own for flag in verdict.flags)
        told = ", ".join(
            f"`{flag}` {count}" if flag.startswith("-") else f"{flag} {count}" for flag, count in reasons.items()
        )
        example = f"`{min((line.words for line in shared), key=len)}`" if shared else "-"
        text += f"| {family} | {len(own)} | {len(shared)} | {told or '-'} | {example} |\n"
    return text + "\n"


def _reasons(found: Found) -> str:
    """How many lines each reason refuses, and how many it refuses alone."""
    refused = [set(verdict.flags) for _, verdict in found if not verdict.is_shared]
    counts = Counter(flag for flags in refused for flag in flags)
    alone = Counter(next(iter(flags)) for flags in refused if len(flags) == 1)
    text = "| named by the refusal | lines | of these by it alone |\n|---|---|---|\n"
    for flag, count in counts.most_common():
        text += f"| {_name(flag)} | {count} | {alone[flag]} |\n"
    return text


def _ways_out(outs: Found) -> str:
    led = Counter(ways_out.outcome(line, verdict) for line, verdict in outs)
    text = "\n" + WAYS_OUT + "| with its way out a line | lines |\n|---|---|\n"
    return text + "".join(f"| {words} | {count} |\n" for words, count in sorted(led.items()))


def _name(flag: str) -> str:
    return f"`{flag}`" if flag.startswith("-") else flag
