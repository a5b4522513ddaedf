# SPDX-License-Identifier: Apache-2.0
"""Every knob of the server, each written once, and the only reader of the environment.

The flags travel to SGLang's processes as one frozen ``Config``. ``docs/operations.md`` prints the same table.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from banyan import knobs
from banyan.core import Address
from banyan.knobs import above_zero, at_least, check, from_zero_to, knob, zero_or_more
from banyan.refusals.combinations import combination_refusal

SHARING, TIERS, NODES, GPU = "sharing", "tiers", "nodes", "gpu"
"""The groups of knobs, a table of the documentation each."""

SHARE_CHOICES = ("peer", "index", "off")
SGLANG_POLICY = "sglang"
POLICY_CHOICES = (
    SGLANG_POLICY,
    "round_robin",
    "session_sticky",
    "affinity",
    "linear",
    "lmetric",
    "unified",
    "hybrid",
    "dualpath",
    "level",
)
DEFAULT_POLICY = "lmetric"
LEVEL_POLICY = "level"
"""The default where ranks step together."""
AUTO_LOAD_BALANCE = "auto"
"""SGLang's default for ``--load-balance-method``: the user has not chosen one."""
AUTO = "auto"
"""A size that is chosen at the start."""
PLAN_CHOICES = ("measured", "move")
DEFAULT_PAGE_TOKENS = 16
ADMIT_CHOICES = ("first", "second")
DEFAULT_TOLD_SHARE, MOST_TOLD_SHARE = 0.1, 0.5
TCP, NIXL, DEFAULT_NIXL_PLUGIN = "tcp", "nixl", "UCX"
"""Carriers of pages between nodes."""
KEEP_FOLDER = "/dev/shm/banyan"
ARENA_FOLDER = "banyan-arena-1"
"""In the folder that the user names, which may hold files of his: only what lies in here is ours to remove."""
PART_FILE = "part-{}"
"""In there: the frames of one rank's part of the arena, by the number of the part."""

GIB = 1 << 30
HTTP_APP_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
FLAGS_VARIABLE = "BANYAN_FLAGS"
OFF_VARIABLE = "BANYAN_FEATURES_OFF"
CPU_ISA_WITHOUT_AMX = "AVX512_CORE_BF16"
"""In the words of ONEDNN_MAX_CPU_ISA, oneDNN's own variable."""
CPU_FEATURE_FOR_BFLOAT16 = "avx512bw"
"""In the words of /proc/cpuinfo. Without it oneDNN multiplies bfloat16 in a plain loop."""


def addresses(values: tuple[str, ...]) -> str | None:
    """A check: what is wrong with a list of page servers."""
    try:
        for value in values:
            Address.parse(value)
    except ValueError as error:
        return str(error)
    return None


def _kept_folder(text: str) -> str:
    """A switch that may name a folder; in a file of flags it is ``true`` or ``false``."""
    switch = {"true": KEEP_FOLDER, "false": ""}
    return switch[text] if text in switch else os.path.abspath(text)


def told_share_of(value: float) -> str | None:
    """A check: what is wrong with a share of a tier for one tenant."""
    return None if 0 <= value <= MOST_TOLD_SHARE else f"a share from 0 to {MOST_TOLD_SHARE:g}"


def _or_off(word: str) -> str:
    """YAML takes ``off`` for false."""
    return "off" if word.lower() == "false" else word


def carrier_of(value: str) -> str | None:
    """A check: what is wrong with a carrier of pages between nodes."""
    word, plus, plugin = value.partition("+")
    is_well = value == TCP or (word == NIXL and (plugin.isalnum() and plugin.isascii() if plus else True))
    return None if is_well else "tcp, nixl, or nixl+PLUGIN as nixl+LIBFABRIC"


def tenant_share_of(value: float) -> str | None:
    """A check: what is wrong with a share of a tier that one tenant's pages may fill while others want room."""
    return None if 0 < value < 1 else "a share above 0 and below 1"


def hot_rank_knob(flag: str, group: str) -> float:
    """The guard's factor, of a server and of the router."""
    return knob(
        2.0,
        flag,
        group,
        """Send no request to a rank whose ongoing tokens exceed this factor times the others' mean, plus one prompt,
        plus 4 x the prompt tokens that only this rank has cached. inf: no limit.""",
        metavar="FACTOR",
        check=lambda value: None if value >= 1 else "at least 1 (inf: no rank is hot)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the user asked for."""

    share: str = knob(
        "peer",
        "--banyan-share",
        SHARING,
        """peer: ranks fetch pages from each other. index: ranks report to the dispatcher what they hold, but fetch
        nothing. off: ranks share nothing; Banyan's other features stay on.""",
        choices=SHARE_CHOICES,
        parse=_or_off,
    )
    min_fetch_tokens: int = knob(
        DEFAULT_PAGE_TOKENS,
        "--banyan-min-fetch-tokens",
        SHARING,
        # One page: copying a page beats computing it.
        "Compute matches shorter than this instead of fetching them.",
        metavar="TOKENS",
        check=at_least(1, "token"),
    )
    prefix_hints: bool = knob(
        True,
        "--banyan-no-prefix-hints",
        SHARING,
        "Do not look prompts up in the dispatcher; this spares hashing them.",
        switches_to=False,
    )
    log_json: bool = knob(
        False,
        "--banyan-log-json",
        SHARING,
        "Write Banyan's log lines as JSON, one object each; SGLang's stay as they are.",
        switches_to=True,
    )
    answer_details: bool = knob(
        True,
        "--banyan-no-answer-details",
        SHARING,
        """Leave cached_tokens_details out of answers. These details say where a prompt's tokens were cached and which
        rank holds them, which can reveal other tenants' prompts.""",
        switches_to=False,
    )
    tells_lines: bool = knob(
        False,
        "--banyan-tell-lines",
        SHARING,
        """Show the text of a line that changes in every turn of a session in /server_info, `banyan top` and the web
        page. Without it they show where the line is. It is text of a prompt.""",
        switches_to=True,
    )
    policy: str = knob(
        SGLANG_POLICY,
        "--banyan-policy",
        SHARING,
        f"""Policy that chooses a request's rank; sglang: SGLang's own method. Default: {DEFAULT_POLICY}, or
        {LEVEL_POLICY} under attention data parallelism, or sglang where --load-balance-method is given or prompts are
        not looked up.""",
        choices=POLICY_CHOICES,
        metavar="NAME",
        unset=DEFAULT_POLICY,
        is_open=True,
    )
    hot_rank_factor: float = hot_rank_knob("--banyan-hot-rank-factor", SHARING)
    plan: str = knob(
        "measured",
        "--banyan-plan",
        SHARING,
        "measured: move a prefix only if moving is expected to be faster than computing it. move: always move it.",
        choices=PLAN_CHOICES,
    )
    host_gb: float | None = knob(
        None,
        "--banyan-host-gb",
        TIERS,
        """Size of the host arena: DRAM that keeps pages which leave the pools, one copy for all ranks of the node. 0:
        no arena. auto: a few times the pools, at most a quarter of the free memory; no arena if ranks do not fetch.""",
        metavar="GIB",
        parse=lambda text: None if text == AUTO else float(text),
        unset="auto",
        check=zero_or_more("a size in GiB", "no host arena"),
    )
    keep_host_arena: str = knob(
        "",
        "--banyan-keep-host-arena",
        TIERS,
        f"""Keep the host arena in this folder on tmpfs (default {KEEP_FOLDER}) when the server ends; the server's next
        start on this node reuses its pages. Needs a size in --banyan-host-gb.""",
        metavar="DIR",
        parse=_kept_folder,
        const=KEEP_FOLDER,
        unset="not kept",
    )
    told_share: float = knob(
        DEFAULT_TOLD_SHARE,
        "--banyan-told-share",
        TIERS,
        """Share of a tier for the pages that the cache keeps by command for one tenant (pin, retain); those of all
        tenants together may take half of it, and 262,144 pages at most. 0: nothing is kept.""",
        metavar="SHARE",
        check=told_share_of,
    )
    store: tuple[str, ...] = knob(
        (),
        "--banyan-store",
        TIERS,
        """Keep pages in these folders, striped over them, across restarts; several servers of the same model may use
        them at once. file:///PATH is the same as PATH; 3fs:///PATH is a folder of a mounted 3FS; nixl+posix:///PATH
        is written and read by NIXL; mooncake://HOST:PORT[?OPTIONS] is the memory that a Mooncake master gives out.
        Needs the arena.""",
        metavar="[URL|PATH][,PATH...]",
        parse=lambda text: tuple(path for path in text.split(",") if path),
        unset="none",
    )
    store_gb: float = knob(
        100.0,
        "--banyan-store-gb",
        TIERS,
        """Capacity of the store, over all servers that use it. Ignored for mooncake://, where the contributing
        clients set the capacity.""",
        metavar="GIB",
        check=above_zero("a size in GiB"),
    )
    store_admit: str = knob(
        "second",
        "--banyan-store-admit",
        TIERS,
        """first: write a page to the store at its first access. second: only at its second access. Default: second;
        first on prefill and decode servers.""",
        choices=ADMIT_CHOICES,
        unset="second",
        is_open=True,
    )
    store_write_gb_per_day: float = knob(
        0.0,
        "--banyan-store-write-gb-per-day",
        TIERS,
        "Limit of writes to the store per day, for the drive's endurance. 0: no limit.",
        metavar="GIB",
        check=zero_or_more("GiB", "no limit"),
    )
    store_read_mb_per_s: float = knob(
        0.0,
        "--banyan-store-read-mb-per-s",
        TIERS,
        "Limit of reads from the store per rank, in 10^6 bytes a second, for shared drives. 0: no limit.",
        metavar="MB",
        check=zero_or_more("a rate", "no limit"),
    )
    store_layers_per_read: int | None = knob(
        None,
        "--banyan-store-layers-per-read",
        TIERS,
        """Layers per read of the store. 1: stream layer by layer. 0: read whole pages before the forward pass. auto:
        the fewest layers that make 128 KiB of a page.""",
        metavar="LAYERS",
        parse=lambda text: None if text == AUTO else int(text),
        unset="auto",
        check=at_least(0),
    )
    listen: str = knob(
        "",
        "--banyan-listen",
        NODES,
        """Lease pages of the host arena to other nodes, at this port and the next one; with tensor parallelism each
        further shard takes the next two ports. Without it nothing listens, but for NIXL where --banyan-carrier nixl
        borrows.""",
        metavar="HOST:PORT",
        check=lambda value: addresses((value,)) if value else None,
        unset="nothing listens",
    )
    peers: tuple[str, ...] = knob(
        (),
        "--banyan-peers",
        NODES,
        """Ask these other nodes (not the ranks of this server) for prefixes that this node does not hold; name each by
        its --banyan-listen.""",
        metavar="HOST:PORT[,HOST:PORT...]",
        parse=lambda text: tuple(peer for peer in text.split(",") if peer),
        check=addresses,
        unset="none",
    )
    secret_file: str = knob(
        "",
        "--banyan-secret-file",
        NODES,
        "File with the secret that all nodes share; only its owner may open it (mode 0600).",
        metavar="PATH",
        parse=os.path.abspath,
        unset="none",
    )
    tenant_secret_file: str = knob(
        "",
        "--banyan-tenant-secret-file",
        SHARING,
        """Serve only requests that a router with the same secret vouches for, and keep the prefixes of its tenants
        apart (`banyan route --tenants-file`); mode 0600.""",
        metavar="PATH",
        parse=os.path.abspath,
        unset="none",
    )
    tenant_share: float | None = knob(
        None,
        "--banyan-tenant-share",
        TIERS,
        """Share of the arena and of the store that the pages of one tenant may fill while others want room: a tenant
        with less loses nothing to one with more. Needs --banyan-tenant-secret-file.""",
        metavar="SHARE",
        parse=float,
        check=tenant_share_of,
        unset="off",
    )
    dscp: int | None = knob(
        None,
        "--banyan-dscp",
        NODES,
        """Mark the KV that travels between servers with this DSCP, for switches that know traffic classes: remote
        leases over TCP, and hand-overs of a pair over RoCE.""",
        metavar="N",
        parse=int,
        check=from_zero_to(63),
        unset="none",
    )
    in_flight_kb: int = knob(
        512,
        "--banyan-in-flight-kb",
        NODES,
        """Limit of unacknowledged bytes over all remote leases together: in this host's queues and in the network. It
        bounds how long other traffic in the same queues waits.""",
        metavar="KIB",
        check=at_least(32, "KiB"),
    )
    carrier: str = knob(
        TCP,
        "--banyan-carrier",
        NODES,
        """What carries pages between nodes. nixl: reads by NIXL with its UCX plugin (RDMA, shared memory, TCP), or with
        the plugin named; its ports ask nobody who he is. Where only one of two nodes has it, and whenever it is not up:
        tcp.""",
        metavar="tcp|nixl[+PLUGIN]",
        check=carrier_of,
    )
    ib_service_level: int | None = knob(
        None,
        "--banyan-ib-service-level",
        NODES,
        "Send hand-overs of a pair over InfiniBand on this service level (SL).",
        metavar="N",
        parse=int,
        check=from_zero_to(15),
        unset="UCX's",
    )
    copy_sms: int = knob(
        16,
        "--banyan-copy-sms",
        GPU,
        """SMs that copies between pools may use: a green context of their own if the driver allows it, else a grid of
        this many programs. Copies to the arena run beside it, with at most 16 programs. On an H200 16
        programs move 350 to 550 GB/s.""",
        metavar="N",
        check=at_least(1, "processor"),
    )
    copy_layers_per_launch: int = knob(
        4,
        "--banyan-copy-layers-per-launch",
        GPU,
        "Layers that one copy kernel moves: fewer start a copy earlier, more need fewer launches. Not measured yet.",
        metavar="LAYERS",
        check=at_least(1, "layer"),
    )

    def __post_init__(self) -> None:
        check(self)
        line = combination_refusal(self)
        if line is not None:
            raise ValueError(line)

    @property
    def shares(self) -> bool:
        """Whether ranks publish what they hold."""
        return self.share != "off"

    @property
    def sizes_arena(self) -> bool:
        """Whether the host arena is as large as the pools and the free memory suggest, if there is any room at all."""
        return self.host_gb is None and self.fetches

    @property
    def has_arena(self) -> bool:
        """Whether there is to be a host arena."""
        return self.sizes_arena or bool(self.host_gb)

    @property
    def deals_with_nodes(self) -> bool:
        """Whether pages come from other nodes, or go there."""
        return bool(self.listen or self.peers)

    @property
    def nixl_plugin(self) -> str:
        """NIXL's, where pages between nodes go by it; else empty."""
        word, _, plugin = self.carrier.partition("+")
        return "" if word == TCP else plugin.upper() or DEFAULT_NIXL_PLUGIN

    @property
    def reads_into_arena(self) -> bool:
        """Whether pages come into the arena that a copy into a pool may have to wait for."""
        return bool(self.store or self.peers)

    @property
    def knows_weights(self) -> bool:
        """Whether pages meet servers that may have other weights under the same name."""
        return bool(self.store or self.keep_host_arena or self.deals_with_nodes)

    @property
    def host_bytes(self) -> int:
        """Bytes that the user gave the host arena, over all ranks."""
        return int((self.host_gb or 0.0) * GIB)

    @property
    def store_bytes(self) -> int:
        return int(self.store_gb * GIB)

    @property
    def store_write_bytes_per_day(self) -> int:
        """What this server may write; 0: no limit."""
        return int(self.store_write_gb_per_day * GIB)

    @property
    def fetches(self) -> bool:
        """Whether ranks copy from each other."""
        return self.share == "peer"

    @property
    def looks_up(self) -> bool:
        """Whether the dispatcher knows what the ranks hold."""
        return self.shares and self.prefix_hints


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add Banyan's flags to SGLang's parser."""
    group = parser.add_argument_group("banyan", "One prefix cache over all data-parallel ranks.")
    group.add_argument(
        "--enable-banyan",
        action="store_true",
        help="Share cached prefixes between the data-parallel ranks of this node.",
    )
    knobs.add_to(group, Config)


def take_flags(args: argparse.Namespace, *, default_policy: str = DEFAULT_POLICY) -> Config | None:
    """Remove Banyan's flags from the namespace; None when Banyan was not asked for.

    ``default_policy`` chooses ranks where neither the user nor SGLang's own flag says who does.

    Raises:
        ValueError: for a value out of range, naming the flag.
    """
    values = {name: vars(args).pop(name) for name in list(vars(args)) if name.startswith("banyan_")}
    if not vars(args).pop("enable_banyan", False):
        return None
    taken = knobs.take_from(values, Config)
    looks_up = taken["share"] != "off" and taken["prefix_hints"]
    leaves_it_open = vars(args).get("load_balance_method", AUTO_LOAD_BALANCE) == AUTO_LOAD_BALANCE
    is_paired = vars(args).get("disaggregation_mode", "null") != "null"
    chosen = {
        "policy": default_policy if looks_up and leaves_it_open else SGLANG_POLICY,
        "store_admit": "first" if is_paired else "second",
    }
    return Config(**{**chosen, **taken})


def flags_given(args: argparse.Namespace) -> list[str]:
    """Those of Banyan's flags, but ``--enable-banyan``, that somebody has given."""
    return knobs.given(vars(args), Config)


def flags_in_environment() -> list[str] | None:
    """Banyan's flags for programs that build SGLang's arguments themselves, as the words of a command line; or None.

    Raises:
        ValueError: where a quotation does not end.
    """
    text = os.environ.get(FLAGS_VARIABLE)
    return None if text is None else shlex.split(text)


def names_flags() -> bool:
    """Whether there are such flags, whatever they say."""
    return FLAGS_VARIABLE in os.environ


def cache_folder() -> Path | None:
    """Where this user keeps what can be computed again; None for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(named if os.path.isabs(named) else os.path.expanduser("~/.cache"))
    return caches / "banyan" if caches.is_absolute() else None


def uses_expandable_segments() -> bool:
    """Whether torch's CUDA allocator was told to use expandable segments, which CUDA IPC cannot export."""
    text = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + "," + os.environ.get("PYTORCH_ALLOC_CONF", "")
    return "expandable_segments:true" in text.lower().replace(" ", "")


OF_COMPUTING = (
    "SGLANG_EXTERNAL_MODEL_PACKAGE",
    "SGLANG_FP8_IGNORED_LAYERS",
    "SGLANG_HUMMING_ONLINE_QUANT_CONFIG",
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR",
)
"""Settings of SGLang that are no flags, and with which more than a last bit of KV differs."""


def settings_of_computing() -> dict[str, str]:
    """Those that are made."""
    return {name: os.environ[name] for name in OF_COMPUTING if os.environ.get(name)}


def external_models() -> str:
    """The package that has models in the place of SGLang's own; empty where none is named."""
    return os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE", "")


def _is_true(name: str) -> bool:
    """As SGLang reads its own."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y")


def sizes_pool_after_capture() -> bool:
    """Whether SGLang was told to make the KV pool of virtual memory that it fills after CUDA graphs were captured."""
    return _is_true("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")


def skips_draft_extend() -> bool:
    """Whether SGLang was told to leave a draft's rows unwritten while it drafts nothing."""
    return _is_true("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND")


def captures_states() -> bool:
    """Whether SGLang was told to run layers of Kimi's kind in captured pieces of a prefill. Unset is for Banyan."""
    name = "SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND"
    return name in os.environ and not _is_true(name)


def sends_cached_prefixes_early() -> bool:
    """Whether SGLang was told to hand a cached prefix over ahead of the forward. Unset is for Banyan."""
    return _is_true("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX")


def uses_rust_server() -> bool:
    """Whether SGLang's Rust server was chosen; it dispatches without the Python controller."""
    return _is_true("SGLANG_RUST_SERVER")


def names_grpc_port() -> bool:
    """Whether SGLang is to open a port for gRPC beside HTTP; ``--grpc-port`` is the flag for it."""
    return "SGLANG_GRPC_PORT" in os.environ


def uses_rust_servicer() -> bool:
    """Whether the Rust form of SGLang's gRPC servicer was chosen; it speaks to the ranks without the controller."""
    # ``--servicer-impl`` is not SGLang's own flag: its package keeps the choice here.
    return os.environ.get("SMG_SGLANG_SERVICER_IMPL", "").lower() == "rust"


def names_other_http_app(app: str) -> bool:
    """Whether the user has named another application than this one for SGLang's HTTP workers, where there are
    several."""
    return os.environ.get(HTTP_APP_VARIABLE, app) != app


def serve_in_workers(app: str) -> None:
    """Have SGLang's HTTP workers serve this one."""
    os.environ[HTTP_APP_VARIABLE] = app


def most_cpu_isa() -> str | None:
    """The instruction set that oneDNN may go up to; None for whatever the processor has."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA")


_inherited: dict[str, str] = {}


def inherit(variables: Mapping[str, str]) -> None:
    """Give these to the processes that this one starts, unless the user has set them."""
    _inherited.update(variables)
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def inherited() -> Mapping[str, str]:
    """What ``inherit`` was given, for processes of the server that somebody else starts."""
    return dict(_inherited)


def tell_switched_off(names: Iterable[str]) -> None:
    """Let the processes that this one starts know which features are off."""
    os.environ[OFF_VARIABLE] = ",".join(sorted(names))


def switched_off() -> list[str]:
    """The features that the process which started this one has switched off."""
    return [name for name in os.environ.get(OFF_VARIABLE, "").split(",") if name]


def allowed_plugins() -> list[str] | None:
    """The plugins that SGLANG_PLUGINS allows; None when it allows all."""
    names = os.environ.get("SGLANG_PLUGINS", "")
    return [name.strip() for name in names.split(",")] if names else None


@contextlib.contextmanager
def kept_environment() -> Iterator[None]:
    """What happens within leaves no trace in the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
