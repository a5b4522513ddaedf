# SPDX-License-Identifier: Apache-2.0
"""The simulator drives the policies of the product's packages. It would be worth nothing if it drove its own copies of
them; what no server decides lies in one file of its own, and its page says so."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import banyan.planner
import banyan.routing
import banyan_lab.sim
from banyan.pacing import admission, allowance, correction, write_pause
from banyan.routing import Reason, policies, reads
from banyan_lab.sim import offline, placement, source_rules, systems
from banyan_lab.sim.workload import agent_set

SIM = Path(banyan_lab.sim.__file__).parent
PACKAGE = Path(banyan.routing.__file__).parents[1]
PAGE = Path(__file__).parents[3] / "docs" / "simulator.md"
RULES = source_rules.__name__
DECIDERS = ("banyan.routing", "banyan.planner", "banyan.pacing", "banyan.arena")
SHIPPED = (banyan.routing, policies, reads, banyan.planner, admission, allowance, correction, write_pause)


def trees():
    for path in sorted(SIM.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def test_sim_when_it_uses_a_shipped_name_then_it_imports_it():
    """No class and no function of the simulator has the name of a shipped one."""
    shipped = {
        name
        for package in SHIPPED
        for name, value in vars(package).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("banyan.")
    }
    assert {"DualPath", "split_read", "PrefillCost", "WritePause"} <= shipped
    copies = [
        f"{path.name}:{node.lineno} {node.name}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in shipped
    ]
    assert not copies, "\n".join(copies)


def imports(path):
    """``(module, name)`` of all that a file imports from the packages that decide."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(DECIDERS):
            yield from ((node.module, alias.name) for alias in node.names)


def taken_by_servers():
    """``(module, name)`` of what a file of the product takes from another one. Handing a name on is no use of it."""
    for path in (path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"):
        for module, name in imports(path):
            taken = getattr(importlib.import_module(module), name, None)
            if getattr(taken, "__module__", None) != ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts):
                yield taken


def test_page_when_the_simulator_has_rules_of_its_own_then_it_names_them_and_servers_have_none_of_these():
    found = inspect.getmembers(source_rules, inspect.isfunction)
    rules = [name for name, function in found if function.__module__ == RULES]
    assert rules == ["decode_rank", "group_policy", "is_held_back", "is_read_by_decode"]
    assert [name for name in rules if f"`{name}`" not in PAGE.read_text()] == []
    # Whatever the simulator takes of the product, a server takes too, or another file of the product.
    taken = [*taken_by_servers(), *banyan.routing.POLICIES.values()]
    alone = {
        name
        for path in SIM.rglob("*.py")
        for module, name in imports(path)
        if callable(found := getattr(importlib.import_module(module), name)) and found not in taken
    }
    assert alone == set()


def test_sim_when_it_looks_at_loads_or_reasons_then_only_to_count_them_or_to_hand_them_to_a_policy():
    """Comparing loads is deciding, and so is asking why a rank was chosen. Both are done in ``banyan.routing`` and in
    the rules of its own only."""
    loads = {"read_queue_tokens", "ongoing_tokens", "pending_tokens", "num_waiting", "free_tokens", "num_running"}
    told = {*loads, "reason", *Reason.__members__}
    caching = {"_prefill_state", "_decode_state", "_group_state", "_decode_group_state", "audit", "step_s"}
    found = []
    for path, tree in ((path, tree) for path, tree in trees() if path.stem != "source_rules"):
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(function):
                names = {getattr(part, "attr", None) for part in ast.walk(node)} & told
                is_choice = isinstance(node, ast.Compare) or (
                    isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("min", "max", "sorted")
                )
                if names and is_choice and function.name not in caching:
                    found.append(f"{path.name}:{node.lineno} {function.name} {sorted(names)}")
    assert not found, "\n".join(found)


class Asked(Exception):
    """What was to be called was called."""


def play_without(monkeypatch, owner, name, system="dualpath"):
    """A run of a system in which calling ``name`` ends it."""

    def ask(*args, **kwargs):
        raise Asked

    monkeypatch.setattr(owner, name, ask)
    site = systems.deployment("deepseek-27b", prefill_nodes=1, decode_nodes=1)
    offline.run_offline(systems.SYSTEMS[system], site, agent_set("agents-32k"), num_agents=2)


@pytest.mark.parametrize(("owner", "name"), [(policies.DualPath, "choose"), (banyan.planner.PrefillCost, "piece_us")])
def test_dualpath_when_code_that_servers_call_is_taken_away_then_the_simulation_stops(monkeypatch, owner, name):
    """It is really called in a run: the rank by the policy, the time of a forward's piece to cut a batch. Servers
    price plans with the latter; their batches SGLang cuts."""
    with pytest.raises(Asked):
        play_without(monkeypatch, owner, name)


def test_split_reads_when_the_rule_of_real_pairs_is_taken_away_then_the_simulation_stops(monkeypatch):
    """Split reads are those of servers: with their detour, and no part that is not worth it."""
    with pytest.raises(Asked):
        play_without(monkeypatch, placement, "decode_part", "split")


@pytest.mark.parametrize("name", ["decode_rank", "group_policy", "is_held_back", "is_read_by_decode"])
def test_dualpath_when_a_rule_that_no_server_calls_is_taken_away_then_the_simulation_stops(monkeypatch, name):
    """So figures of DualPath rest on rules of the simulator alone (``source_rules``), as its page says."""
    with pytest.raises(Asked):
        play_without(monkeypatch, placement, name)
