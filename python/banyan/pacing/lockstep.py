# SPDX-License-Identifier: Apache-2.0
"""What one rank may cost the others where all step together (attention data parallelism).

Every layer's rows are gathered from all ranks, so a rank that waits makes every rank wait, in decode too.

Nobody waits in a circle
  A circle needs a rank that waits for another rank's progress in its scheduler. A rank waits for:
  (a) a copy: a thread or a stream that reads pages which were complete when they were published; their owner need not
      run.
  (b) on a GPU, the forwards of a source that it had launched before it published. With overlap the source publishes the
      pages of step k after it has launched step k+1, so that wait may cover step k+1, which stands still until every
      rank has launched it. A rank leases while it builds a batch, before it tells the others the batch's size, and the
      source launches step k+1 after that. So whoever sees these pages has built step k+1 already: its waiting forward
      is k+2 or later, and its own k+1 is launched. THIS HANGS ON ONE ORDER: the lease comes before the exchange of
      batch sizes in every step. A path that leases or publishes outside the step (a read for a request that has just
      come, a back-up) may only copy; no forward waits for it.
  (c) its own allocator, for a reader whose copy goes on by itself: (a). The lease ends with the copy, by a thread or by
      a word that the stream writes, and never by the reader's scheduler: that may be waiting for this rank.
  (d) the store's threads; never here: what has not landed is not promised (``follows_reads``).
  With drafts a step is several forwards, of the draft and of the model, and an idle rank goes through all of them. The
  model's waits for a copy, and with its last layer for the draft's part of it; the draft's do not. SGLang exchanges
  twice in such a step: first whether any rank has a prompt to compute, then, if none has, the sizes of decodes. The
  lease comes before the first.

Nobody waits for long
  1. A rank promises what has landed, never a read of the store under way.
  2. In one step it moves what comes in the time of a decode step, as both were measured here, or one request: the next
     one waits for the next step. So a decode of another rank takes twice as long at most, beside any number of small
     moves. ``MOST_MOVED_BYTES`` while either is not known, and where a rank has several shards, who measure different
     times and must cut a batch alike.
  3. What a move makes the forward wait is charged once for every rank when moving is compared with computing.
  4. Pages in quarantine are not counted on for a prefill, and loading waits ``LOAD_PATIENCE_S`` for them, then the
     tail is computed. Nor for a decode: SGLang retracts a request instead, but for the last one, which waits. (Where a
     rank has several shards, their quarantines differ and no shard may decide alone: that they load nothing they agree
     on, and for pages to compute into they wait until readers let go.)
     Of a model with windows this holds for either pool, and what a token moves is what both have of it. But SGLang
     retracts no request for what is held there: a decode that finds no other page to evict waits for the copy, as the
     copy's reader does in the same step. Nor is a batch planned with slots of states that are held; a request that
     finds no other for a copy of its own waits in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

LOAD_PATIENCE_S = 0.03
"""A copy of ``MOST_MOVED_BYTES`` takes a third of it. A rank that steps alone waits no longer for readers: it may
hold leases for copies that have not begun, which do not go on by themselves, so there a circle is possible."""

READER_PATIENCE_S = 60.0
"""A copy takes milliseconds, but it may be queued behind a long forward of its reader. A reader that holds a page for
longer is stuck, and then the pool really is short."""

MOST_MOVED_BYTES = 256 << 20
"""10 ms over PCIe 4.0 x16 at 25 GB/s: taken until moves and forwards were measured."""


def most_moved_tokens(token_bytes: int, decode_us: float | None, token_us: float | None) -> int:
    """How many tokens of ``token_bytes`` each a step may move.

    ``decode_us``: what a step takes that decodes; ``token_us``: what it takes to move a token. None: not known.
    """
    if decode_us is None or token_us is None:
        return MOST_MOVED_BYTES // token_bytes
    return int(decode_us / token_us)


@dataclass(slots=True)
class MoveBudget:
    """What one rank still moves in the step that is being put together."""

    most_tokens: int
    moved_tokens: int = 0

    def has_room(self, num_tokens: int) -> bool:
        """Whether a request that moves so much may join. The first may, or it never would."""
        return num_tokens == 0 or self.moved_tokens == 0 or self.moved_tokens + num_tokens <= self.most_tokens

    def take(self, num_tokens: int) -> None:
        self.moved_tokens += num_tokens
