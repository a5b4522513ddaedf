# SPDX-License-Identifier: Apache-2.0
"""The native core: shared memory, the page directory of a node, leases, and page copies.

Processes meet in a `RankTable`. A rank announces its pool there with a `FrameTable` and reads the other ranks through
`Peers`.

Common to all:

* Keys are `list[str]` of 64 hexadecimal digits each (sha256 page keys). Anything else is a `ValueError` that names
  the position.
* Frames cross as C-contiguous one-dimensional int64 buffers (numpy arrays; no torch tensors, no lists) and come back
  as `bytes`
  of little-endian int64: `numpy.frombuffer(result, dtype=numpy.int64)`. A frame number is the page's index in its pool.
* A geometry is `geometry[layer][extent] = (base_bytes, page_bytes)`: page `p` of the extent is the `page_bytes` bytes
  at `base_bytes + p * page_bytes` of the pool. Extents do not overlap; pages fit until the next extent begins.
  With `frame_bytes` the pool is framed instead: all layers of page `p` lie together, and an extent of it at
  `base_bytes + p * frame_bytes`. Packed and framed pools of the same page sizes exchange pages.
* `ValueError`: the arguments cannot be right, with the numbers; nothing was changed. `OSError`: the system refused.
* Objects do not survive `fork`: start ranks with `spawn`. Nothing is left behind by a killed process: the memory has
  no name.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict

import numpy.typing as npt
from typing_extensions import Buffer

# numpy declares its arrays to be buffers from Python 3.12 on only.
Frames: TypeAlias = Buffer | npt.NDArray[Any]

class Member(TypedDict):
    slot: int
    pid: int
    alive: bool
    namespace: str
    num_frames: int
    num_published: int

def copy_form() -> str:
    """How long pieces are copied on this processor, in words."""

def available_bytes() -> int | None:
    """What is left of memory, by the machine or by the control groups of this process, whichever is less.

    None: neither says.
    """

class SharedBytes(Buffer):
    """Zeroed shared memory, writable for the process that made it and readable for its peers.

    It supports the buffer protocol (`torch.frombuffer`, `numpy.frombuffer`); a view keeps it mapped. Any thread.
    """

    @staticmethod
    def create(num_bytes: int, label: str) -> SharedBytes:
        """Reserve `num_bytes`; `label` shows in /proc/<pid>/maps.

        Raises OSError (ENOMEM, with the sizes) when the machine or the control group does not have them now: all
        bytes are backed
        on return, so that no later store fails. Takes about a second per few GiB; the GIL is released.
        """

    @staticmethod
    def reserve(num_bytes: int, label: str) -> SharedBytes:
        """As `create`, but nothing is backed: call `back` for what is about to be used. Peers see the whole."""

    def extended(self, num_bytes: int, label: str) -> SharedBytes:
        """This memory with `num_bytes` more behind it. Views of the shorter one stay, and show the same bytes.

        Peers see the whole from now on, also by way of the shorter one. Raises OSError as `create` does; ValueError for
        nothing, or more than there can be. The GIL is released.
        """

    def back(self, offset: int, num_bytes: int) -> None:
        """Give these bytes memory, so that no later store to them fails. Raises OSError; the GIL is released."""

    @staticmethod
    def keep(path: str, num_bytes: int) -> tuple[SharedBytes, bool]:
        """Memory that outlives this process: the file `path` on tmpfs. Whether it is what an earlier process has left.

        A file of another size, or one that others may open, is removed and made anew. Raises BlockingIOError while
        another process has it, ValueError where `path` is not on tmpfs, OSError as `create` does.
        """

    def forget(self, offset: int, num_bytes: int) -> None:
        """Put zeroes in the place of these bytes, and other memory: what writes to the old one is not seen any more.

        Only for memory that `keep` gave. Offset and size are multiples of 4096. Raises OSError where some of the old
        memory stays, because somebody holds a larger page that it is a part of.
        """

    def checksums(
        self, namespace: bytes, keys: list[str], offsets: Buffer, page_bytes: int, layer: int = 0
    ) -> list[int]:
        """A checksum for each page, or part of one, of its bytes, its key, the namespace and a layer.

        The GIL is released; nobody may write to the pages meanwhile.
        """

    @property
    def num_bytes(self) -> int: ...
    @property
    def path(self) -> str:
        """Where another process of this user opens it, while this object lives."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class DevicePool:
    """A pool in memory that no process can map by a descriptor (a GPU's). Any thread.

    `description` tells a peer how to open it and is opaque here; `Peers.description` hands it out. Bases of a geometry
    on such a pool are places in a numbering of `num_bytes` bytes that the description and its reader agree on.
    """

    def __init__(self, description: bytes, num_bytes: int) -> None: ...

class PeerMemory:
    """A peer's pool, mapped for as long as this object lives: for a device that reads it by address. Only the buffer is
    read-only: drivers register no memory that is mapped so."""

    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def extents(self) -> list[tuple[int, int]]:
        """`(base_bytes, stride_bytes)`, layer by layer. A page under a lease may be read."""

    @property
    def identity(self) -> tuple[int, int]:
        """Which memory it is: the same whenever it is announced again, and no other's while this object lives."""

    @property
    def path(self) -> str:
        """Where it can be opened while its owner lives; `identity` says whether it is this one."""

    def checksums(self, namespace: bytes, keys: list[str], offsets: Buffer, page_bytes: int, layer: int) -> list[int]:
        """As those of `SharedBytes`, of leased pages."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class RankTable:
    """The table in which the ranks of one server find each other: made once by the process that launches them. Any
    thread."""

    @staticmethod
    def create(num_slots: int) -> RankTable:
        """Make a table of 1 to 64 slots."""

    @staticmethod
    def open(path: str) -> RankTable:
        """Open the table of another process of this user.

        Raises OSError when the path cannot be opened, ValueError when it holds no rank table or one of another format.
        """

    @property
    def path(self) -> str:
        """`/proc/<pid>/fd/<n>` of this process: where other processes open the table while this one lives."""

    @property
    def num_slots(self) -> int: ...
    @property
    def page_tokens(self) -> int:
        """Tokens of a page, as the ranks have said; 0 before the first of them."""

    def agree_on_page_tokens(self, page_tokens: int) -> None:
        """Say how many tokens a page has here. Raises ValueError when another rank has said another number."""

    def count_failure(self) -> None:
        """Something of Banyan's has failed in a process of this server and was not passed on."""

    @property
    def num_failures(self) -> int:
        """How often that has happened in all of them."""

    def set_num_silent(self, num_ranks: int) -> None:
        """Say how many ranks have work and have not reported for long; the server's dispatcher does."""

    @property
    def num_silent(self) -> int:
        """What was last said so; 0 where nobody looks."""

    def set_reading(self, slot: int, num_pages: int) -> None:
        """Say how many pages the rank in a slot of this process is waiting for from the store."""

    def reading(self, slot: int) -> int:
        """What was last said so; 0 of a slot that nobody is in. Raises ValueError when there is no such slot."""

    def set_read_rate(self, slot: int, pages_per_s: int) -> None:
        """Say how many pages a second have been coming from the store to the rank in a slot of this process."""

    def read_rate(self, slot: int) -> int:
        """What was last said so; 0 where nothing was. Raises ValueError when there is no such slot."""

    def epochs(self) -> list[int]:
        """Of every slot: it grows with each change of what a rank says there, and costs a look at shared memory."""

    def members(self) -> list[Member]:
        """The attached ranks, by slot. A killed one stays, with `alive` False and `num_published` 0, until its slot
        is taken again."""

class Demand:
    """How likely pages are to be wanted again: learnt from what prompts ask for, here and on the ranks whose logs are
    read of. One thread.

    Pages go by numbers as `page_numbers` gives them; a prompt's from its first page on. Some ten times as many pages as
    the pools hold are remembered, in 8 bytes each and 32 MB at most.
    """

    def __init__(self, num_frames: int) -> None:
        """`num_frames`: of the pools whose prompts are known here, at least one."""

    @property
    def powers(self) -> tuple[float, float]:
        """What has been learnt: a page's chance goes as its age to the one power, and as its accesses to the other."""

    def asked(self, numbers: bytes, prompt: str) -> int:
        """A prompt of these pages has come, and waits here until the one of its name is `served`. How many of its first
        pages were asked for before, here or at a peer, since `weights_changed`."""

    def weights_changed(self) -> None:
        """What was asked for before was asked of other weights."""

    def peer_access(self, numbers: bytes) -> None:
        """A prompt of these pages has come to a peer."""

    def served(self, prompt: str) -> None:
        """The prompt waits no longer, if it did: the tree holds its pages for it, or it has gone."""

    def came(self, numbers: bytes) -> None:
        """The tree has these pages of one chain now. Those that no prompt has named begin their age."""

    def reuse_probabilities(self, numbers: bytes) -> list[float]:
        """Of each page to be wanted, as against other pages; infinite while a prompt waits here that asks for it."""

    def age_and_accesses(self, number: int) -> tuple[int, int]:
        """How many pages were asked for since the page was, and how often it was, from 1 to 8. A page that is not known
        is older than all others."""

class Reuse:
    """How much of what is asked for could be found: if nothing were lost, and in caches of other sizes. One thread.

    Pages go by numbers as `page_numbers` gives them; a prompt's from its first page on. Less than 1 MB. Times are
    seconds and do not fall.
    """

    def __init__(self, page_tokens: int, most_pages: int, seed: int) -> None:
        """`most_pages`: what returns after so many others counts as never asked for. `seed`: 64 bits that nobody knows
        who chooses prompts. ValueError for pages without tokens."""

    def asked(self, numbers: bytes, now_s: int) -> None:
        """A prompt of these pages has come."""

    def came(self, numbers: bytes) -> None:
        """The cache has these pages of one chain now. Those that no prompt has named may be found from now on."""

    def answered(self, num_tokens: int, num_pages: int, computed: bytes, now_s: int) -> None:
        """A prompt of so many tokens, and of so many pages that a cache may supply, is answered. `computed`: those of
        its pages that were not found."""

    def ceiling(self, num_minutes: int, now_s: int) -> float:
        """Of the prompts' tokens of the last minutes, 1,440 at most, the share that could have been found; 0.0 of
        none."""

    def num_tokens(self, num_minutes: int, now_s: int) -> int:
        """The prompts' tokens of the last minutes, 1,440 at most."""

    def found_within(self, num_pages: float) -> float:
        """Of the prompts' tokens of the last day, the share that a cache of so many pages would have found that evicts
        the page that was asked for longest ago."""

def page_numbers(keys: list[str]) -> bytes:
    """What pages are called in 64 bits, of which the lowest says nothing: little-endian int64."""

def page_number(key: str) -> int: ...

class FrameTable:
    """A rank's announcement of its pool. Belongs to one thread (the scheduler).

    A frame is idle, published, or in quarantine: withdrawn, while a peer may still be reading it. Frames in
    quarantine must not be
    written; `drain` hands them back. The frame table keeps the pool alive.
    """

    def __init__(
        self,
        rank_table: RankTable,
        slot: int,
        namespace: bytes,
        pool: SharedBytes | DevicePool,
        num_frames: int,
        geometry: list[list[tuple[int, int]]],
        frame_bytes: int | None = None,
    ) -> None:
        """Take `slot` and announce `num_frames` frames, none of them published.

        `namespace` is 32 bytes; ranks of different namespaces do not see each other. ValueError when the slot is held
        by a live
        process or the geometry does not fit `num_frames` pages into the pool.
        """

    def publish(self, frames: Frames, keys: Sequence[str]) -> int:
        """Make `frames[i]` findable as `keys[i]`; returns how many are new. The pages must be complete.

        Passed over: a frame already published under the same key, and a key that another frame of this frame table has
        (the first
        stays). ValueError for a frame published under another key, or in quarantine.
        """

    def retire(self, frames: Frames) -> bytes:
        """Withdraw frames that are about to be reused; returns those that may be reused now.

        The others are in quarantine until `drain` returns them. Frames that are not published are returned as they
        are, frames already
        in quarantine are not. ValueError for a frame named twice.
        """

    def drain(self) -> bytes:
        """Frames that left quarantine: their readers let go or died (noticed within 100 ms). Each is returned once."""

    def take_touched(self, frames: Frames) -> bytes:
        """Those of `frames` that somebody leased since they were last asked about here: what eviction goes by."""

    def log_access(self, pages: bytes) -> None:
        """Tell the peers that a prompt of these pages has come (`page_numbers`). Of a very long one its beginning, of
        a closed frame table nothing."""

    def reset(self) -> None:
        """Withdraw everything (flush, weight update). Frames being read go to quarantine and come out of `drain`; all
        others are free."""

    @property
    def num_published(self) -> int: ...
    @property
    def num_quarantined(self) -> int: ...
    def close(self) -> None:
        """Withdraw everything and leave the slot; idempotent, also on drop. Later on `publish`, `log_access` and
        `take_touched` raise ValueError; frames are retired and drained as before."""

class Match:
    """Where leading pages were at the time of a lookup. Holds nothing; a lease checks again. Immutable."""

    @property
    def num_pages(self) -> int: ...
    @property
    def runs(self) -> list[tuple[int, int]]:
        """`(slot, num_pages)` from the front."""

class Lease:
    """Pages whose owners do not reuse them until `release`, the end of a copy, or the drop of this object. Any
    thread."""

    @property
    def num_pages(self) -> int: ...
    @property
    def runs(self) -> list[tuple[int, int]]: ...
    def sources(self) -> list[tuple[int, int, bytes]]:
        """`(slot, epoch, frames)` from the front: for whoever copies the pages himself. ValueError after `release`."""

    def release(self) -> None:
        """Let go; idempotent. A copy under way keeps its own hold until it has ended."""

class LeaseEnds:
    """Ends leases when a word says so that a stream of a GPU writes behind its copies. The thread that looks at it runs
    no Python. Any thread. It keeps leases whose value never comes."""

    def __init__(self, word: SharedBytes, first: int = 0) -> None:
        """The word is the first 32 bits of `word`, which holds nothing else. `first` is where it starts to count."""

    def expect(self, leases: list[Lease]) -> int:
        """Release them once the word has come to the value returned. Values follow each other, round 32 bits; a stream
        is to write them in that order."""

class Copy:
    """A copy under way on the helper thread. Any thread may wait; waits release the GIL.

    Dropping it before `finish` gives up what has not landed and returns when nothing is written any more. Its leases
    end with it, whether `finish` has been called or not.
    """

    def wait_layer(self, layer: int) -> float:
        """Block until `layer` has landed, or the copy has failed (see `finish`); the seconds waited."""

    def finish(self) -> bool:
        """Wait for the end. True when all layers landed; else the targets hold garbage."""

    def ages_s(self) -> list[float]:
        """Seconds ago: the helper thread began with this copy; then for each layer that is in place, it landed. [] for
        a copy that waits for its turn."""

    @property
    def bytes_fetched(self) -> int:
        """Bytes read from peers so far."""

    @property
    def bytes_copied(self) -> int:
        """All bytes copied so far, also from one own page to another."""

    @property
    def copy_s(self) -> float:
        """Seconds the helper thread spent on it; 0.0 before the end."""

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting in `wait_layer` and `finish`, over all callers."""

    @property
    def has_ended(self) -> bool:
        """Landed or failed: nothing is written any more, and `finish` will not block."""

class PageKeys:
    """Page keys from tokens: SGLang's chained sha256, with a bounded memory of chains hashed before. Any thread.

    A prompt that continues one seen before costs a comparison of its tokens and the hashes of what is new. The answer
    never depends on what is remembered.
    """

    CHUNK_PAGES: int
    """Pages that are remembered, and found again, as one."""

    def __init__(self, page_tokens: int, num_chunks: int, tokens_ahead: int = 0) -> None:
        """Remember up to `num_chunks` (a power of two) chunks: 4 bytes a token and 32 a page.

        `tokens_ahead`: 1 for keys of bigrams, where a page counts as whole once the token behind it is known.
        """

    def of(self, prior: bytes | None, tokens: Frames) -> list[str]:
        """Keys of the whole pages of `tokens`, a buffer of int64 or uint32, chained to the digest `prior`.

        ValueError for a negative token. One of more than 32 bits, as SGLang writes where an image stands, gives its
        page a key of the other form that SGLang has for such pages.
        """

class PromptTokens:
    """A prompt's tokens, chained to the digest `prior`. Any thread."""

    def __init__(self, prior: bytes | None, tokens: Frames, page_tokens: int, tokens_ahead: int = 0) -> None:
        """Copy `tokens`, a buffer of int64 or uint32, the `tokens_ahead` of `PageKeys` at their end. ValueError as for
        `PageKeys.of`."""

    def __len__(self) -> int:
        """Without the `tokens_ahead`."""
    def prefix_fingerprint(self) -> PrefixFingerprint:
        """Made at the first call."""

class PrefixFingerprint:
    """What stays of a prompt to compare others with: 8 bytes a page. For advice: equal prefix fingerprints may, by
    intent, belong to different prompts. Any thread."""

    def __len__(self) -> int:
        """In tokens, whole pages."""

    def row(self) -> PrefixFingerprintRow:
        """A new one, empty, for prefix fingerprints of the same page size."""

    def most_in_common(self, row: PrefixFingerprintRow) -> int:
        """The most leading tokens that it has in common with one of the row; none where the prior digests differ."""

    def oldest_in_common(self, row: PrefixFingerprintRow, num_tokens: int) -> int | None:
        """The place, the latest being 0, of the oldest of the row that begins with the same whole pages of so many
        tokens."""

class PrefixFingerprintRow:
    """Prefix fingerprints in a row, the latest first. One thread at a time."""

    def __len__(self) -> int:
        """The number of prefix fingerprints."""

    def appendleft(self, prefix_fingerprint: PrefixFingerprint) -> None:
        """ValueError for another page size."""

    def pop(self) -> int:
        """Drop the oldest; its length in tokens. IndexError when there is none."""

class Peers:
    """A reader's view of all ranks of its namespace. Any thread, except that one reader bit belongs to one `Peers`
    object."""

    def __init__(
        self,
        rank_table: RankTable,
        slot: int | None,
        reader_bit: int,
        namespace: bytes,
        geometry: list[list[tuple[int, int]]],
        pool: SharedBytes | DevicePool | None,
        frame_bytes: int | None = None,
    ) -> None:
        """A rank passes its slot, a reader bit of its own (0 to 63; its slot will do), and the pool copies land in.

        With `pool=None` it only looks (the controller): `reader_bit` and `geometry` are ignored, `lease` and
        `start_copy` raise.
        `slot=None`: no rank, nothing is left out of lookups. ValueError when a live process has the reader bit.
        """

    def lookup(self, keys: Sequence[str], slots: Sequence[int] | None = None) -> Match:
        """Leading pages that live frame tables hold: the one with the longest run, then on from its end.

        `slots` says which to ask, the preferred first among equally long runs. Without it all but the own one are
        asked, the next above the own first, cyclically, so that ranks choose different sources.
        """

    def holders(self, keys: Sequence[str], slots: Sequence[int]) -> list[int | None]:
        """For each page by itself the first of `slots` that holds it; the own one too, if it is named."""

    def read_access_logs(self, slots: Sequence[int]) -> list[bytes]:
        """The pages that prompts of the ranks in `slots` asked for since the last call, prompt by prompt, as
        `page_numbers`; the lowest bit says where a prompt begins. Waits for nobody: what was logged too long ago was
        missed, and of a prompt then maybe the rest is read."""

    def touch(self, match: Match) -> None:
        """Tell the owners that these pages are wanted: `take_touched` names them. A lease does so by itself."""

    def prefix_lens(self, keys: Sequence[str]) -> list[int]:
        """Per slot, the own one too: how many leading pages it holds; 0 for empty, dead and foreign slots."""

    def prefix_lens_of(self, page_keys: PageKeys, prompt: PromptTokens, max_hashed_pages: int) -> list[int]:
        """`prefix_lens` of a prompt's whole pages, see `PageKeys.of`, for frame tables that publish prefixes.

        Hashes only as far as somebody holds the prompt, and of what is not remembered at most `max_hashed_pages` (in
        whole chunks): beyond that nobody counts as a holder, this time. Who has the last page of a chunk is taken to
        have all.
        """

    def lease(self, match: Match, keys: Sequence[str]) -> Lease | None:
        """Lease the pages `keys`, with which the match begins, in the order of their chain or against it: all of them,
        or None because one changed or its owner died since, or because the match is of other pages."""

    def version(self) -> int:
        """Differs from the last answer when the published set of any rank, or who is there, may have changed. Not
        ordered."""

    def present(self) -> list[tuple[int, int]]:
        """The live ranks besides this one, as `(slot, epoch)`. An epoch names one rank's stay in a slot; deaths show
        within 100 ms."""

    def description(self, slot: int, epoch: int) -> bytes | None:
        """The description of that rank's `DevicePool`. None when it left, or when its pool is mapped."""

    def mapping(self, slot: int, epoch: int) -> PeerMemory | None:
        """That rank's pool as it is mapped here. None when it left, or when its pool is no mapped one."""

    def start_copy(
        self, loads: list[tuple[Lease, Frames]], arrivals: list[tuple[Read, list[int], Frames]] = []
    ) -> Copy:
        """Queue a copy: page `i` of a lease goes to frame `frames[i]` of the own pool, all loads together, layer by
        layer. The leases are the copy's from now on, and end with it at the latest; of a call that is refused they have
        ended.

        `arrivals`: pages of a `Read`, by position, and their frames; each layer follows the read. Keep the read until
        the copy has ended, and ask it which pages were bad: the copy does not know.

        A page that several targets want is fetched once. Target frames belong to the copy until it has ended.
        ValueError for a released
        lease, a target outside the pool or named twice, lengths that differ, or a `DevicePool`.
        """

class Found:
    """Leading pages that the store held at the time of a lookup. A hint, immutable: it holds nothing, a read checks
    again."""

    @property
    def num_pages(self) -> int: ...
    def after(self, num_pages: int, /) -> Found:
        """What was found behind the first `num_pages`; of fewer, nothing."""

class Read:
    """Pages on their way from the store into memory, step by step; copies follow it (`Peers.start_copy`, `FlagRing`).

    A page is *good* in a layer once the checksum of exactly that page and layer, taken over the bytes in memory,
    agrees. Who follows goes on when pages have failed: until `finish` has named them, nothing that was computed
    from a layer may be kept. Dropping it before `finish` gives up, and returns when nothing is written to memory any
    more.
    """

    @property
    def has_ended(self) -> bool:
        """Whether `finish` would return at once."""

    @property
    def is_late(self) -> bool:
        """Whether the device has not answered in time: all pages have failed, nobody waits for layers any more, and
        the frames are the store's until `has_ended`."""

    def offsets(self, positions: list[int]) -> bytes:
        """Where in the memory these of its pages go: int64 byte offsets. ValueError for a page that it has not."""

    def failed_pages(self) -> list[int]:
        """Block until the last layer is through, or the end; the positions of the pages that failed. The end, and the
        reasons, may take another look at what other writers have announced."""

    def finish(self) -> list[tuple[int, str]]:
        """Block until nothing writes the memory any more; the failed pages as (position, reason), [] when all are good.

        Reasons: "gone" (evicted or rewritten meanwhile), "checksum", "io" (the device reported an error), "late"
        (it has not answered in time), "refused" (of another namespace by now, or the system was short of descriptors
        or memory). The record of a page that failed by "checksum" or "io" has been dropped; it is not found again.
        """

    @property
    def bytes_read(self) -> int: ...
    @property
    def read_s(self) -> float:
        """Seconds from the first submission to the last completion; 0.0 before the end."""

class Feed:
    """The other end of a `Read` that no store carries out: who brings the pages says here how far they have come.

    Who feeds writes to the memory until `end`, or the drop of this object, and not afterwards. Any thread.
    """

    def __init__(self, memory: SharedBytes, offsets: Buffer, page_bytes: int, num_layers: int) -> None:
        """Pages of `page_bytes` go to these byte offsets of `memory`. ValueError when they do not fit."""

    def read(self) -> Read: ...
    @property
    def is_wanted(self) -> bool:
        """Whether the reader has not given up; if it has, it waits for `end`."""

    def land(self, num_bytes: int, failed: list[int]) -> None:
        """The next layer is in memory; the pages `failed` are not what they should be."""

    def be_late(self) -> None:
        """Who brings the pages does not answer: all have failed ("late") and nobody waits any longer; `end` comes
        when nothing is written any more."""

    def end(self) -> None:
        """Nothing is written any more. Where layers are missing, all pages have failed ("gone"). Idempotent."""

class Store:
    """The L3 store: pages on one or more file systems, found by page key within one namespace.

    One object for each rank. It owns one I/O thread. Every method may be called from any thread; none but `open`,
    `sync`, `invalidate`, `evict`, `clear` and `close` waits for a device. The format stands in docs/format.md.

    Memory is a `SharedBytes` in which a page occupies a *frame*: the Full Block, layers one after another without gaps,
    from a byte offset that is a multiple of 4096. Frames belong to the store from `put` until `completed` names
    the key, and to a `Read` until it has finished or was dropped. Both keep the memory alive.
    """

    @staticmethod
    def open(
        paths: list[str],
        namespace: bytes,
        layer_bytes: list[int],
        *,
        quota_bytes: int,
        share_bytes: int | None = None,
        floor_bytes: int = 1 << 30,
        segment_bytes: int | None = None,
        backlog_bytes: int = 256 << 20,
        engine: str = "auto",
        read_bytes_per_s: int | None = None,
        stall_s: float = 10.0,
    ) -> Store:
        """Open or create the store that is striped over `paths` (the same list for all its users).

        Args:
            namespace: 32 bytes; pages of other namespaces are never found.
            layer_bytes: bytes of each layer of one page.
            quota_bytes: what all users of these paths may occupy together; nothing grows beyond it.
            share_bytes: what this writer may occupy; the whole quota when None. A server passes quota / number of
                ranks, so that no rank starves another.
            floor_bytes: free bytes to leave on each file system.
            segment_bytes: size of a segment file; chosen from quota and share when None.
            backlog_bytes: pages queued by `put` beyond this are refused ("full").
            engine: "auto" (io_uring, else threads) or "threads".
            read_bytes_per_s: read no faster than this (a drive that others use, or an experiment); None: no limit.
            stall_s: a read that the device has not answered for so long is late; until it has, nothing is found and
                nothing taken. Nothing that waits for the device waits longer without its getting something done.

        Raises ValueError, naming the path and the way out, for a foreign directory, a newer format, a directory of
        another user or one that others may write, a mount point without its mount, or paths that do not belong
        together; OSError when the system refuses.
        """

    def beside(self, namespace: bytes, layer_bytes: list[int], num_stores: int) -> Store:
        """What another namespace, whose pages may have another shape, has in the same folder, to be read: it makes no
        shelf and takes nothing. `num_stores` of them share the limit of reads. OSError when the system refuses."""

    @property
    def engine(self) -> str:
        """What does the I/O, as one line for the log: "io_uring, O_DIRECT" ..., with the reason for a fallback."""

    @property
    def version(self) -> int:
        """Differs from the last answer when a lookup may answer differently. Costs nanoseconds."""

    def register(self, memory: SharedBytes) -> None:
        """Announce memory that pages will move in and out of: it is pinned now, not while the first read waits."""

    def lookup(self, keys: list[str]) -> Found:
        """The longest run of leading pages, by whichever writer. Touches what it finds. Never blocks on a device."""

    def read(
        self, found: Found, num_pages: int, memory: SharedBytes, offsets: Frames, *, layers_per_step: int = 1
    ) -> Read:
        """Bring the first `num_pages` of `found` up: page `i` into the frame at byte `offsets[i]` of `memory`.

        Steps of `layers_per_step` layers, over all pages, go in forward order; 1 streams layer by layer. The number of
        layers reads whole pages (fastest when nothing waits for a layer): all layers are done at the end. Requests of
        more than 512 KiB are cut between layers.
        ValueError for an offset that is not a multiple of 4096, outside `memory`, or named twice.
        """

    def put(self, keys: list[str], parent: str | None, memory: SharedBytes, offsets: Frames) -> list[str]:
        """Queue a chain of complete pages: `keys[0]` follows the page `parent` (None: a first page), `keys[i]` follows
        `keys[i - 1]`. One word for each page:

        "queued":  its frame belongs to the store until `completed` names it.
        "present": stored or queued already, by this writer or another. Nothing to wait for, as with all below.
        "elsewhere": another writer is just writing it.
        "full":    the back-log is at its bound, or the store takes no writes now.
        "orphan":  its parent is neither stored nor queued; without it the page could never be found.
        """

    def completed(self) -> list[tuple[str, str]]:
        """Pages whose frames the store has let go since the last call, as (key, "stored" | "failed").

        Stored means durable."""

    @property
    def identity(self) -> str:
        """Tells this store from any other; the same for all its users, on whichever node. Reads a small file."""

    def moved(self, most: int) -> tuple[list[int], list[int]]:
        """What has come to this writer's own shelf and what has gone from it since the last call, `most` pages: those
        that are there now, and those that are not. By the first 64 bits of their keys, signed, as KV events name
        them. The first call begins; what was there before, `own_pages` lists."""

    def own_pages(self, first_place: int, num_places: int) -> list[int] | None:
        """Names of what lies in these places of this writer's own shelf. None behind the last place."""

    def sync(self, within_s: float | None = None) -> int:
        """Write out the back-log regardless of pacing, wait until it is durable; the number of pages that failed.

        Raises TimeoutError when the drive gets nothing done for `stall_s`, or all of it takes longer than `within_s`:
        what has not started has failed then, what has is named by `completed` when it is over.
        """

    def pause_writes(self) -> None:
        """Start no more writes until `open_writes`."""

    def open_writes(self) -> None:
        """Write whenever nobody on this node reads (an idle server). The state after `open`."""

    def invalidate(self, namespace: bytes) -> None:
        """Go on in another namespace (weights were updated). At once: no page of the old one is found, reads of it
        fail as "gone", queued pages complete as "failed"; its records are the first to be evicted."""

    def evict(self, num_pages: int) -> int:
        """Evict by policy from this writer's own records; how many went. What others stand behind stays."""

    def keep(self, keys: list[str]) -> None:
        """From now on these go only when nothing else of this writer's can, also those that are not there yet."""

    def let_go(self, keys: list[str]) -> None:
        """These go as any other."""

    def share_out(self, share: float) -> None:
        """From now on each owner has this share of this writer's places while others want room: whoever has more makes
        it first. Nobody, owner 0, has none."""

    def put_for(
        self, owner: int, keys: Sequence[str], parent: str | None, memory: SharedBytes, offsets: Frames
    ) -> list[str]:
        """As `put`, of pages that are an owner's. More than 65,535 owners are not told apart: the others are nobody."""

    def adopt(self, owner: int, keys: list[str]) -> None:
        """Of the leading pages of `keys`, those on this writer's shelf that are nobody's are an owner's from now on. A
        restart makes all of them nobody's."""

    def clear(self) -> int:
        """Withdraw every record of this writer's shelf, whatever stands behind it; how many. What is queued completes
        as "failed". When it returns, nobody on this node finds one of them and no restart brings one back; what others
        have written behind them is found again when those pages are stored anew.

        Raises OSError when the drive has not taken it within `stall_s`: this writer finds them no more, others may
        until it has.
        """

    def stats(self) -> dict[str, int]:
        """Counters since open and gauges; the names are those of `banyan store stat`."""

    def close(self) -> None:
        """Finish what is being written, drop the rest of the back-log, and leave. Idempotent, also on drop."""

class WriteGate:
    """When the store starts a write: the rule itself, for those that simulate a store. Permits as the `Store`'s."""

    def pause_writes(self) -> None: ...
    def open_writes(self) -> None: ...
    def may_write(self, *, num_reads: int, num_writes: int) -> bool:
        """Whether a write may start now, beside so many reads on the node and writes of this store."""

def store_preview(paths: list[str]) -> None:
    """ValueError or OSError for what a server would refuse these paths of a store, as far as it can be told. Makes
    nothing."""

def store_check(paths: list[str]) -> dict[str, Any]:
    """Read every record and verify it (`banyan fsck`); changes nothing. Safe while the store is in use."""

def store_repair(paths: list[str]) -> dict[str, Any]:
    """As `store_check`, and withdraw what is bad. Shelves whose writer lives are only checked."""

def store_remove(paths: list[str], shelf: str) -> None:
    """Remove the shelf, named as `store_survey` does. ValueError for one that is in use or not there."""

def store_remove_idle(paths: list[str]) -> tuple[list[str], int]:
    """Remove all shelves whose writer is gone: which were, and how many could not be, for each of which a line says
    why."""

def store_ceiling(path: str, kind: str, request_bytes: int, num_requests: int, depth: int, memory: str) -> float:
    """Seconds that plain io_uring takes for so many requests of one size to the file at `path` (made if too short).

    `memory` is "shared", as the pages of ranks, or "private", as the buffers of one process.

    `kind` is "read" (each place once, in a shuffled order) or "durable-write" (in order, with fdatasync as often as
    the store does it). No index, no checksums: what the file system gives. For `banyan bench store`, and only where the
    core was built with the feature `ceiling`.
    """

def store_survey(paths: list[str]) -> dict[str, Any]:
    """What is in the store, from its manifests alone; safe while it is in use."""

class FlagRing:
    """Words in `memory` that tell streams of a GPU how far reads of the store have come, and a thread that writes them.
    Any thread.

    Every batch is answered to its last layer, whatever becomes of it. Dropping the ring fails what is left and joins.
    """

    SLOT_BYTES: int
    def __init__(self, memory: SharedBytes, num_slots: int, first: int = 0) -> None:
        """`memory` holds `num_slots * SLOT_BYTES` bytes and nothing else. `first` is where the words start to count."""

    def follow(self, reads: list[Read]) -> RingBatch | None:
        """Answer for reads that are under way: a layer once all of them have it.

        A page that failed its checksum is told by its read. None when every slot is taken. ValueError for no reads, or
        for reads of different numbers of layers.
        """

    def give_back(self, batch: RingBatch) -> bool:
        """The device is past the batch's word: its slot may be used again. False while it has not ended."""

class RingBatch:
    """A batch in its slot of a `FlagRing`. Any thread."""

    @property
    def answer_offset(self) -> int:
        """Of the word that a stream waits for, in the ring's memory."""

    def value(self, layer: int) -> int:
        """What the word holds for this layer: at least it, counted round 32 bits."""

    @property
    def has_ended(self) -> bool: ...
    @property
    def has_failed(self) -> bool:
        """True before the first answer that is not good."""
