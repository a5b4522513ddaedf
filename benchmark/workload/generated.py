# SPDX-License-Identifier: Apache-2.0
"""Seeded multi-turn chats: nothing to download, the same chats for the same seed on every machine.

Lengths follow what chat logs show: short questions, answers several times as long, both log-normal. The words
are common English ones, so a tokenizer gives about 1.3 tokens a word; no two chats share more than a few
words at their start, so that any cached prefix is the chat's own (or the shared system prompt).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmark.workload.conversation import Conversation, Message

GENERATED = "generated"
"""What `--dataset` calls these chats."""

_COMMON_WORDS = """
    about above account across action after again against agree air allow almost along already
    although always amount animal another answer appear apply area argue around arrive article
    aspect attempt average avoid balance base battle beautiful because become before begin behind
    believe benefit better between beyond bird blue board book border bottle branch bridge bright
    bring brother budget build business butter camera capital careful carry cause center century
    certain chain change chapter charge cheap child choice circle city clean clear climb clock close
    cloud coast coffee collect color column combine common compare complete concern condition
    connect consider contain content continue control copper corner correct cotton count country
    couple course cover create cross culture current custom damage danger dark daughter decide deep
    degree deliver depend describe desert design detail develop device differ difficult dinner
    direct discover discuss distance divide doctor double doubt dream drive during early earth east
    economy edge education effect effort either electric element empty energy engine enjoy enough
    enter entire equal escape evening event evidence exact example exchange exercise exist expect
    experience explain express extend factor fair family farm fashion favor field figure final
    finger finish flame flight floor flower follow food foreign forest formal forward frame freedom
    fresh friend front fruit future garden general gentle glass global gold grain grand grass great
    green ground group growth guard guide habit half hammer happen harbor health heart heavy height
    history hold honest hotel house human idea image improve include increase industry inform inside
    instead iron island issue join journey judge keep kitchen knowledge labor ladder language large
    later laugh leader learn leather lesson letter level library light limit liquid listen little
    local machine manner market master matter measure member memory message metal method middle
    minute mirror modern moment morning mother motion mountain music narrow nation nature near
    needle neighbor network never north note notice number object observe ocean offer office often
    open opinion orange order ordinary origin other outside paint paper parent particular party
    pattern people perhaps period person picture piece place plant plate point police position
    possible powder practice prepare present press prevent price process produce promise proof
    protect public purpose quality question quick quiet quite rail rain range rather reach reason
    receive record red region regular relation remain remember repair repeat reply report require
    rest result reward rhythm right river road roof round rule safe salt sample scale school science
    season second secret section seed seem sentence separate serious service settle seven several
    shadow shape share sharp shelf shelter short silver simple single sister small smooth social
    soil solid soon sound south space special spring square stage station steel stone store story
    straight strange stream street strong structure student subject sudden sugar summer support
    surface system table teacher temper theory thick thing thought thread through ticket together
    tomorrow touch toward town trade travel treat tree
"""
_WORDS = tuple(_COMMON_WORDS.split())


@dataclass(frozen=True)
class ChatShape:
    """How long generated chats are, in words; the spread is the sigma of a log-normal."""

    num_turns: int = 4
    mean_question_words: int = 70
    mean_answer_words: int = 210
    spread: float = 0.35


def generate_conversations(num_conversations: int, *, seed: int, shape: ChatShape | None = None) -> list[Conversation]:
    """`num_conversations` chats of `shape`; chat i depends on the seed and i alone, not on how many are asked
    for."""
    shape = shape or ChatShape()
    return [_conversation(index, random.Random(f"{seed}/{index}"), shape) for index in range(num_conversations)]


def random_ids(rng: random.Random, num_tokens: int) -> list[int]:
    """A prompt that nobody has cached, of ordinary token ids."""
    return [100 + rng.randrange(1000) for _ in range(num_tokens)]


def _conversation(index: int, rng: random.Random, shape: ChatShape) -> Conversation:
    messages = []
    for _ in range(shape.num_turns):
        messages.append(Message("user", _text(rng, _length(rng, shape.mean_question_words, shape.spread))))
        messages.append(Message("assistant", _text(rng, _length(rng, shape.mean_answer_words, shape.spread))))
    return Conversation(id=f"generated-{index:04d}", messages=tuple(messages))


def _length(rng: random.Random, mean: int, spread: float) -> int:
    # exp(mu + sigma^2 / 2) is the mean of a log-normal: shift mu so that `mean` is met.
    factor = rng.lognormvariate(-spread * spread / 2, spread)
    return max(3, round(mean * factor))


def _text(rng: random.Random, num_words: int) -> str:
    words = rng.choices(_WORDS, k=num_words)
    sentences = []
    while words:
        count = rng.randint(6, 14)
        sentence, words = words[:count], words[count:]
        sentences.append(" ".join(sentence).capitalize() + ".")
    return " ".join(sentences)
