# SPDX-License-Identifier: Apache-2.0
"""Servers on which tenants cannot be kept apart: pure, one line for each, with the way out."""

from __future__ import annotations

from dataclasses import dataclass

from banyan.refusals.rule import Rule, lines_of

FLAG = "--banyan-tenant-secret-file"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFacts:
    """How a server with tenants was asked to serve."""

    shares: bool = True
    is_embedding: bool = False
    speaks_grpc: bool = False


_RULES: tuple[Rule[TenantFacts], ...] = (
    Rule(
        lambda f: not f.shares,
        lambda f: (
            f"{FLAG} with --banyan-share off: no rank tells the router that it keeps tenants apart: use "
            "--banyan-share index"
        ),
    ),
    Rule(
        lambda f: f.is_embedding,
        lambda f: (
            f"{FLAG} with --is-embedding, or a model for vectors or scores: SGLang has no salt for such prompts: serve "
            "each tenant by a server of its own, or use --disable-radix-cache without that flag"
        ),
    ),
    Rule(
        lambda f: f.speaks_grpc,
        lambda f: (
            f"{FLAG} with gRPC (--grpc-port or SGLANG_GRPC_PORT, --smg-grpc-mode, --grpc-mode): it has no keys of "
            "tenants: serve HTTP alone"
        ),
    ),
)


def tenant_refusals(facts: TenantFacts) -> list[str]:
    """The lines for a server; none where tenants can be served."""
    return lines_of(_RULES, facts)


def file_refusal(*, path: str, error: object) -> str:
    """The line for a secret that cannot be used."""
    return f"{FLAG} {path}: {error}"


def misfit_refusal(why: str) -> str:
    """The line for an SGLang that Banyan does not fit: without it nothing keeps tenants apart."""
    return f"{FLAG}: tenants cannot be kept apart: {why}: install the SGLang that Banyan is written against"
