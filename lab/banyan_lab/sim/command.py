# SPDX-License-Identifier: Apache-2.0
"""``banyan sim``: the simulator's studies as tables, JSON and pictures. Every figure is simulated."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banyan_lab.replay import TraceError
from banyan_lab.sim.figures import Figure

FULL_AGENTS = 1024
TRACED_AGENTS = 128
FULL_SCALE_AGENTS = 48 * 1024
FULL_GROUPS = 22


def main(argv: Sequence[str]) -> int:
    """Run one study; 0 also when figures do not land: that is a finding, not a failure."""
    given = vars(_parser().parse_args(argv))
    study = STUDIES[given["study"]]
    for option in given.keys() - study.options.keys() - {"study"}:
        raise SystemExit(f"banyan sim: --{option.replace('_', '-')} does not belong to {given['study']}")
    args = argparse.Namespace(**{**study.options, **given})
    try:
        figures = list(study.run(args))
        if figures:
            _show(args, figures)
    except (TraceError, OSError) as error:
        _say(f"banyan sim: {error}")
        return 2
    return 0


def _show(args: argparse.Namespace, figures: Sequence[Figure]) -> None:
    if args.json:
        print(json.dumps([figure.as_row() for figure in figures], indent=2))
    else:
        _print_table(figures)
    if args.plot:
        from banyan_lab.sim.plots import draw

        for path in draw(args.study, figures, args.plot):
            _say(f"wrote {path}")


def _parser() -> argparse.ArgumentParser:
    # What is not given is the study's own default, or does not belong to it.
    parser = argparse.ArgumentParser(prog="banyan sim", description=__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("study", choices=sorted(STUDIES), help="; ".join(f"{k}: {v.about}" for k, v in STUDIES.items()))
    parser.add_argument(
        "--json", action="store_true", help="one JSON list of rows: name, published, simulated, unit, source"
    )
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write pictures there")
    parser.add_argument("--out", type=Path, metavar="DIR", help="sweep and trace: where the results go")
    parser.add_argument("--seed", type=int, help="of studies that draw; default 0")
    parser.add_argument(
        "--agents",
        type=int,
        help=f"agents of each DualPath run (the source: {FULL_AGENTS}, the default; trace: {TRACED_AGENTS})",
    )
    parser.add_argument("--trace", type=Path, help="dp: a recorded workload instead of a generated one")
    parser.add_argument(
        "--scale-agents", type=int, help=f"scale: agents of the large cluster; default {FULL_SCALE_AGENTS}"
    )
    parser.add_argument(
        "--groups", type=int, help=f"online-scale: groups of 2P4D (the source: {FULL_GROUPS}, the default)"
    )
    return parser


def commit() -> str:
    """That of the checkout that this file belongs to, or "unknown"."""
    try:
        for words in (("ls-files", "--error-unmatch", __file__), ("rev-parse", "HEAD")):
            command = ["git", "-C", str(Path(__file__).parent), *words]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_table(figures: Iterable[Figure]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="simulated")
    for column in ("figure", "published", "simulated", "unit", "lands", "hinges on"):
        table.add_column(column, overflow="fold")
    for figure in figures:
        lands = {True: "yes", False: "no", None: ""}[figure.lands]
        published = "" if figure.published is None else f"{figure.published:.4g}"
        table.add_row(figure.name, published, f"{figure.simulated:.4g}", figure.unit, lands, figure.note)
    Console().print(table)


def _dualpath(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim.dualpath import DualPathStudy

    study = DualPathStudy(num_agents=args.agents, seed=args.seed, progress=_say)
    for part in (
        study.ablation,
        study.balance,
        study.speedups,
        study.ratios,
        study.lengths,
        study.pooled,
        study.online,
        study.split,
    ):
        yield from part()


def _scale(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim.dualpath import DualPathStudy

    return DualPathStudy(scale_agents=args.scale_agents, seed=args.seed, progress=_say).scale()


def _rates(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim.rates import RateSweep

    sweep = RateSweep(seed=args.seed, progress=_say)
    yield from sweep.figures()
    if args.plot:
        from banyan_lab.sim.plots import draw_parts

        _say(f"wrote {draw_parts(sweep.by_system(), args.plot)}")


def _online_scale(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim.online_scale import OnlineScale

    return OnlineScale(num_groups=args.groups, seed=args.seed, progress=_say).figures()


def _break_even(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim import break_even

    return break_even.figures()


def _h20(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim import h20

    return h20.figures(seed=args.seed, progress=_say)


def _tutti(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim import tutti

    return tutti.figures()


def _pd_ratio(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim import pd_ratio

    return pd_ratio.figures()


def _cost(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim import cost

    return cost.figures()


def _ratio(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim import cache_compute

    return cache_compute.figures()


def _dp(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim import dp

    return dp.figures(args.trace, seed=args.seed, progress=_say)


def _pressure(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim import pressure

    return pressure.figures(seed=args.seed, progress=_say)


def _sweep(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim import sweep

    folder = _needed(args.out)
    # What runs is the commit of now: somebody may go on to another meanwhile.
    about = {"kind": "simulated", "seed": args.seed, "commit": commit(), "agents": args.agents}
    rows = sweep.run(num_agents=args.agents, seed=args.seed, progress=_say)
    (folder / "sweep.csv").write_text(sweep.as_csv(rows), encoding="utf-8")
    (folder / "sweep.json").write_text(json.dumps({**about, "rows": rows}, indent=2), encoding="utf-8")
    from banyan_lab.sim.plots import draw_sweep

    _say(f"wrote {folder / 'sweep.csv'}, {folder / 'sweep.json'}, {draw_sweep(rows, folder)}")
    return []


def _trace(args: argparse.Namespace) -> Iterable[Figure]:
    from banyan_lab.sim.chrome_trace import TurnSpans
    from banyan_lab.sim.cluster import Cluster
    from banyan_lab.sim.engine import Simulation
    from banyan_lab.sim.systems import SYSTEMS, deployment
    from banyan_lab.sim.workload import agent_set

    path = _needed(args.out) / "trace.json"
    sim, spans = Simulation(args.seed), TurnSpans()
    site = deployment("deepseek-v3-2", prefill_nodes=2, decode_nodes=4)
    cluster = Cluster(sim, site, SYSTEMS["dualpath"], on_turn=spans.add)
    for trajectory in agent_set("agents-32k").trajectories(args.agents, sim.chance("trajectories")):
        cluster.start(trajectory)
    sim.run()
    path.write_text(spans.as_json(), encoding="utf-8")
    _say(f"wrote {path}: open it in chrome://tracing or ui.perfetto.dev")
    return []


def _needed(folder: Path | None) -> Path:
    if folder is None:
        raise SystemExit("banyan sim: this study writes files; say where with --out DIR")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True, slots=True)
class Study:
    """``options``: those that belong to it, and what they are where nobody gives them."""

    run: Callable[[argparse.Namespace], Iterable[Figure]]
    about: str
    options: Mapping[str, Any]


SHOWN = {"json": False, "plot": None}
DRAWN = {**SHOWN, "seed": 0}
WRITTEN = {"out": None, "seed": 0}

STUDIES = {
    "dualpath": Study(
        _dualpath,
        "ablation, speed-up, P/D ratios, turn lengths, a DRAM pool, online capacity (minutes)",
        {**DRAWN, "agents": FULL_AGENTS},
    ),
    "scale": Study(
        _scale,
        "1,152 GPUs and 48K agents (up to ten minutes)",
        {**DRAWN, "scale_agents": FULL_SCALE_AGENTS},
    ),
    "rates": Study(
        _rates, "parts of the time to the first token, and the second and further ones, by arrival rate", DRAWN
    ),
    "online-scale": Study(
        _online_scale,
        "44P88D online against 2P4D (a quarter of an hour; less with --groups)",
        {**DRAWN, "groups": FULL_GROUPS},
    ),
    "break-even": Study(_break_even, "separated against combined workers by prompt length", SHOWN),
    "h20": Study(_h20, "eight H20s under coding agents, as in the Elastic P2P report", DRAWN),
    "tutti": Study(_tutti, "crossover hit rates, bubbles, read/write interference", SHOWN),
    "dp": Study(
        _dp,
        "data-parallel ranks with prefix sharing on and off, by policy; PD-combined and PD-separated",
        {**DRAWN, "trace": None},
    ),
    "pressure": Study(
        _pressure, "8 nodes of 8 GPUs whose pools are too small: hits by who evicts what (minutes)", DRAWN
    ),
    "pd-ratio": Study(_pd_ratio, "P/D ratios without a bottleneck, on paper and simulated", SHOWN),
    "cost": Study(_cost, "cost per million tokens, drive endurance", SHOWN),
    "cache-compute": Study(_ratio, "GB of KV to load for each PFLOP", SHOWN),
    "sweep": Study(
        _sweep,
        "systems x sizes x workloads; saves table, seed, commit and picture to --out",
        {**WRITTEN, "agents": FULL_AGENTS},
    ),
    "trace": Study(_trace, "one run as a Chrome trace in --out", {**WRITTEN, "agents": TRACED_AGENTS}),
}
