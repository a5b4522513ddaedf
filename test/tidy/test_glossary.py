# SPDX-License-Identifier: Apache-2.0
"""The words that packages, files and public classes of the product are named after are in the glossary, each once.

Words of ordinary engineering, and SGLang's, need no entry; they are listed here. Whoever names something new adds a
line to the glossary, or a word here when nobody would ask what it means.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "banyan"

ORDINARY = set(
    """
    above action active adder address admission all allocator allowance announcement answer app asked asking
    attention auto backend bad banyan batch below bench best block bound budget cache cacheable capability capacity
    checkpoint choice choose cleared cli clock combination config connection controller copies core corrected correction
    cost counter cpu cuda decision description device doctor drive dry engine entry error estimate estimated event
    executor explain fact failure fault file finding flag followed forward forwarder float8 found full gauge given gpu
    grid group grown growth hash health host index init io ipc item json kernel kind kv landed launch layer layout
    learned limit line list load local location log long lost main maker memory metal meter metric mha mla mode
    model mooncake move native no node nothing number offline open openai opened order outcome own paced page part
    path peer permitted plot port position prefill prefix pricing probe processor prompt python query queue rate
    ratio read reason recent reference refused remote removed report request rerun resolved result return route row
    run runtime seen sent server setting severity sglang shape shareable shared sighting size sizing space start stat
    state stopwatch stored stream subscription table telemetry time timer token too trans transport tried
    unanswered unavailable unified unreached until upstream usage value verdict view wait waited waiting watch
    watchdog watched wearing webpage whole wire write
    complaint counting endpoint everywhere folder option task thread
    assemble evicting filled launched paired reporting scheme seating setup site
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


def test_names_when_they_are_looked_up_then_the_glossary_or_everybody_knows_them():
    text = (ROOT / "docs" / "glossary.md").read_text().lower()
    known = {singular(word) for word in re.findall(r"[a-z]+", text)} | {singular(word) for word in ORDINARY}
    strange = {word: where for word, where in names() if word and word not in known}
    assert strange == {}, "\n".join(f"{word}: {where}" for word, where in sorted(strange.items()))
