# SPDX-License-Identifier: Apache-2.0
"""The words that packages, files and public classes of the product are named after are in the glossary, each once.

Words of ordinary engineering, of the field and of SGLang need no entry; they are listed here. Whoever names something
new takes the field's word for it; a word of our own needs a line in the glossary, and there is room for few.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "banyan"

MAX_WORDS = 90
"""A newcomer can learn so many. An entry of several words counts as several."""

ORDINARY = set(
    """
    abort above action active actor adder address admission affinity agent alert all allocator allowance
    announcement answer app arrival asked asking assemble attempt auto backend bad banyan batch below best block
    body bound bounded branch break budget busy cache cacheable call caller capability capacity carrier channel chat
    checkpoint choice choose cleared cli clock combination coming compressed condition config connection
    control controller conversation copies core correction cost counter cpu cuda decision declined decoding demand
    described description device doctor drive driver dropped dry dsa dualpath duplicate else elsewhere ending endpoint
    engine entry error estimate estimated event everywhere evicting executor explain exported fact failed fault figure
    file filled finding flag fleet folder followed foreign form forward forwarder found full gauge geometry given gpu
    grammar group grown growth grpc hash health hicache history holding hook host http hybrid identity ids image
    index init io iovec ipc json kept kernel kind knob known kv landed large latest launch launched launcher layer
    layerwise layout leased lending lent level limit limited line list lmetric load location lockstep log long look
    lost machine main maker map mapped match memory metric mha mla mode model mooncake mount move native no node
    observe offload openai opened opening option order outcome own pace pacing page paired part path pause peer
    persistence pin placement placer planner planning port prefill prefix prefixes presence pricing probe processor
    program prompt publication python quarantining query question queue rate ray read readable reading reason
    receiver recent refused regex remote removed rendezvous report reporting request rerun resolved response return
    robin role room round route routing row run runtime said sample scheme screened sealing seeded seen sender sent
    server session setting setup severity sglang shape shared sharing site size sizing space speculation spent start
    stat state step sticky still stop stopwatch stored stranger stream subscription summary table taken task tcp
    telemetry text thread tie tile time timer token too top traced trans transfer transport tried
    unanswered unified unreached until upstream usage value verdict view wait waited waiting walk wanted watch
    watchdog watched wearing web webpage whole why wire worker worth writable write wrong
    """.split()
)


def singular(word):
    for ending, instead in (("ies", "y"), ("ves", "f"), ("sses", "ss"), ("ches", "ch"), ("s", "")):
        if word.endswith(ending) and not word.endswith("ss") and len(word) > 3:
            return word[: -len(ending)] + instead
    return word


def names():
    """``(word, where)`` for each word in the name of a package, file or public class of the product."""
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        for part in relative.with_suffix("").parts:
            for word in part.strip("_").split("_"):
                yield singular(word), str(relative)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for word in re.findall(
                    r"[A-Z]+(?![a-z])|[A-Z][a-z]+", node.name.replace("SGLang", "Sglang").replace("LMetric", "Lmetric")
                ):
                    yield singular(word.lower()), f"{relative}: {node.name}"


def entries():
    text = (ROOT / "docs" / "glossary.md").read_text()
    return re.findall(r"^\| \*\*(.+?)\*\*(?: \((.+?)\))? \|", text, re.MULTILINE)


def test_glossary_when_words_are_counted_then_each_is_there_once():
    words = Counter(f"{word.strip().lower()} {of}".strip() for entry, of in entries() for word in entry.split(","))
    assert [word for word, count in words.items() if count > 1] == []


def test_glossary_when_words_are_counted_then_no_more_than_a_newcomer_can_learn():
    assert sum(len(entry.split(",")) for entry, _ in entries()) <= MAX_WORDS


def test_names_when_they_are_looked_up_then_the_glossary_or_everybody_knows_them():
    text = (ROOT / "docs" / "glossary.md").read_text().lower()
    known = {singular(word) for word in re.findall(r"[a-z]+", text)} | {singular(word) for word in ORDINARY}
    strange = {word: where for word, where in names() if word and word not in known}
    assert strange == {}, "\n".join(f"{word}: {where}" for word, where in sorted(strange.items()))
