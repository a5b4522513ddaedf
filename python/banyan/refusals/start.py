# SPDX-License-Identifier: Apache-2.0
"""What a process of the server may find when it starts: pure, one line for each, with the way out."""

from __future__ import annotations

from collections.abc import Sequence

from banyan import SGLANG_VERSION


def page_hash_refusal(cause: str) -> str:
    """The line for a machine on which SGLang cannot compile its page hash."""
    return (
        f"SGLang cannot build the extension that hashes pages ({cause}): install g++ and the headers of OpenSSL "
        "(libssl-dev, openssl-devel), or start without --enable-banyan"
    )


def misfit_refusal(*, needed_by: str, feature: str, reasons: Sequence[str]) -> str:
    """The line for a server that needs a feature of which a patch does not fit the SGLang that is installed.
    ``needed_by`` names a flag, or what the model has."""
    return (
        f"{needed_by}: needs Banyan's {feature}, which does not fit this SGLang ({'; '.join(reasons)}): install "
        f"sglang=={SGLANG_VERSION} as it was published, do without, or use --banyan-share off"
    )


def allocator_refusal(*, allocator_class: str) -> str:
    """The line for a platform that brings a page allocator of its own."""
    return f"this platform has its own page allocator ({allocator_class}): use --banyan-share off"


def shard_refusal(error: Exception) -> str:
    """The line for one process of a rank that several compute (``--tp``) in which Banyan itself has failed."""
    return (
        f"Banyan cannot be set up in one process of a rank ({type(error).__name__}: {error}), and the others of the "
        "rank cannot go on without it: mend that, or use --banyan-share off"
    )


def device_refusal(obstacle: str) -> str:
    """The line for a GPU whose pages no other rank can reach."""
    return f"{obstacle}: use --banyan-share off"


def unshared_pool_refusal(obstacle: str) -> str:
    """The line for a pool that no other rank can read where it lies, on a server without a host arena."""
    return f"{obstacle}: let pages go through host memory with --banyan-host-gb, or use --banyan-share off"


def components_refusal(components: Sequence[str]) -> str:
    """The line for a model that caches other things than the KV of full attention."""
    names = ", ".join(sorted(components))
    # A window's KV can be kept in full, in the ordinary pool; a state cannot.
    way_out = (
        "use --disable-hybrid-swa-memory (which takes more memory), or --banyan-share off"
        if "SWA" in components and "MAMBA" not in components
        else "use --banyan-share off"
    )
    return f"this model caches {names} state in pools that are not known here: {way_out}"


def pool_layout_refusal() -> str:
    """The line for a pool that SGLang lays out by other code than the one that Banyan stands in for."""
    return "SGLang makes this KV pool in a way of its own (quantized, or sized later): use --banyan-share off"


def disagreement_refusal(error: object) -> str:
    """The line for a rank whose pages are of another size than those of the ranks before it."""
    return f"the ranks of this server disagree: {error}: use --banyan-share off"


def features_refusal(*, off: str) -> str:
    """The line for a process that computes together with others in which other features are off."""
    return (
        f"the processes of this server have different features off ({off or 'none'} in this one; the log of each says "
        f"why): install the same sglang=={SGLANG_VERSION}, plugins and Banyan on all nodes"
    )


def pool_memory_refusal(*, need_bytes: int, error: object) -> str:
    """The line for a pool for which the system gives no shared memory."""
    gib = 1 << 30
    return (
        f"no shared memory of {need_bytes / gib:.2f} GiB for the KV pool of this rank ({error}): lower "
        "--max-total-tokens or --dp-size"
    )


def arena_memory_refusal(*, need_bytes: int, error: object) -> str:
    """The line for a part of the host arena for which the system gives no shared memory."""
    return f"no shared memory of {need_bytes} bytes for the host arena ({error}): lower --banyan-host-gb"


def arena_size_refusal(*, need_bytes: int, available_bytes: int) -> str:
    """The line for a host arena that is larger than what is free before there are any ranks."""
    gib = 1 << 30
    return f"--banyan-host-gb {need_bytes / gib:g}: {available_bytes / gib:.2f} GiB of memory are free: lower it"


def kept_arena_refusal(*, folder: object, error: object) -> str:
    """The line for a folder in which the host arena cannot be kept."""
    return (
        f"--banyan-keep-host-arena {folder}: {error}: name a folder on tmpfs that no other server uses, with "
        "room for --banyan-host-gb"
    )


def device_memory_refusal(error: object) -> str:
    """The line for a device that takes no memory of the host at all."""
    return (
        f"the driver lets no memory of the host be registered ({error}), by which copies tell their end: use "
        "--banyan-share off"
    )


def pinning_refusal(error: object) -> str:
    """The line for a host arena that the driver does not pin."""
    return f"the host arena cannot be pinned ({error}): lower --banyan-host-gb or start without it"


def store_refusal(*, paths: Sequence[str], error: object) -> str:
    """The line for a store that does not open; the error says what is to be done."""
    return f"--banyan-store {','.join(paths)}: {error}"


def page_server_refusal(*, address: object, error: object) -> str:
    """The line for an address at which the page server cannot listen."""
    return (
        f"--banyan-listen {address} (and the port behind it): {error}: name a host of this machine and two free ports"
    )


def weights_refusal(error: object) -> str:
    """The line for weights that lie in no files that could be told from others."""
    return (
        "--banyan-store, --banyan-keep-host-arena, --banyan-listen, --banyan-peers: pages must know their weights; "
        f"these cannot be told: {error}"
    )


def http_worker_refusal(line: str) -> str:
    """The line for an HTTP worker without hooks that the main process has: it would give all tenants one cache."""
    return f"an HTTP worker is not as the main process: there {line}: use --tokenizer-worker-num 1"


def http_app_refusal() -> str:
    """The line for HTTP workers that are to serve another application than Banyan's, sharing or not."""
    return (
        "SGLANG_HTTP_SERVER_APP_PATH with --tokenizer-worker-num: the workers get Banyan's hooks by way of it: "
        "unset it, or use --tokenizer-worker-num 1"
    )


def fault_refusal(error: Exception) -> str:
    """The line for flags at which Banyan itself has failed."""
    return (
        f"these flags cannot be taken ({type(error).__name__}: {error}): start without --enable-banyan, and please "
        "report this"
    )


def chunk_refusal(*, chunk_tokens: int, page_tokens: int, num_ranks: int) -> str | None:
    """The line for chunks of a prompt that end within a page, or None. What the flag says, SGLang has divided among
    ``num_ranks`` that step together."""
    if chunk_tokens % page_tokens == 0:
        return None
    unit = page_tokens * num_ranks
    fitting = max(unit, chunk_tokens * num_ranks // unit * unit)
    return (
        f"--chunked-prefill-size: a rank's chunks of {chunk_tokens} tokens end within a page of {page_tokens} tokens: "
        f"use --chunked-prefill-size {fitting}"
    )


def undecided_refusal(error: Exception) -> str:
    """The line for arguments, or a model, of which it cannot be told whether they can be shared."""
    return (
        f"what this model keeps cannot be told from its configuration ({type(error).__name__}: {error}): start without "
        "--enable-banyan, or use --banyan-share off"
    )
