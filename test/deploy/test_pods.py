# SPDX-License-Identifier: Apache-2.0
"""The chart's own containers, in a container runtime, as their pods say: two servers on two nodes and a router.

The tests follow each other on the same pods.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test.deploy import chart, container, nodes, traffic

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "build" / "deploy" / "image.json"
MODEL = ROOT / "build" / "models" / "tiny" / "llama"
START_S = 1200.0
ARENA_BYTES = 512 << 20
LONG_TOKENS = 1500
PROMPTS = traffic.prompts(1)


def missing():
    """One line for each thing that this machine lacks."""
    if os.geteuid() != 0 or not nodes.runtime():
        yield "no root, or neither crun nor runc"
    if not shutil.which("helm"):
        yield "no helm"
    if not IMAGE.exists():
        yield "no image: scripts/deploy_image.sh"
    if not MODEL.exists():
        yield "no tiny model: scripts/deploy_check.sh makes it"


pytestmark = pytest.mark.skipif(bool(list(missing())), reason="; ".join(missing()))


class Deployment:
    """What the chart's controllers do with its pods, one command after the other."""

    def __init__(self, folder):
        self.documents = chart.documents(chart.rendered("", ROOT / "test" / "deploy" / "cpu.yaml"))
        self.image = container.Image(**json.loads(IMAGE.read_text()))
        self.cluster = nodes.Cluster(folder)
        self.nodes = [self._node(folder / f"node-{number}") for number in range(2)]
        self.servers = [self.start_server(number) for number in range(2)]
        self.router = nodes.Pod(
            self.cluster, "banyan-router", self.pod("Deployment", "banyan-router"), self.image, self.nodes[0], "banyan"
        )

    @staticmethod
    def _node(root):
        models = root / "srv/models/llama"
        shutil.copytree(MODEL, models)
        for path in (root / "srv/models/llama", *models.iterdir()):
            path.chmod(0o755)
        for name in ("nvme0/banyan", "dev/shm"):
            (root / name).mkdir(parents=True)
        nodes.run("mount", "-t", "tmpfs", "-o", f"size={ARENA_BYTES}", "tmpfs", root / "dev/shm")
        for name in ("nvme0/banyan", "dev/shm/banyan"):
            # The image's user is not root.
            (root / name).mkdir(exist_ok=True)
            (root / name).chmod(0o777)
        return root

    def pod(self, kind, name):
        return self.documents[kind, name]["spec"]["template"]["spec"]

    def start_server(self, number):
        name = f"banyan-{number}"
        spec = self.pod("StatefulSet", "banyan")
        return nodes.Pod(self.cluster, name, spec, self.image, self.nodes[number], f"{name}.banyan-servers")

    def wait_until_ready(self):
        nodes.wait_until(
            lambda: all(pod.is_ready for pod in (*self.servers, self.router)),
            START_S,
            f"all pods are ready: {[(pod.name, pod.said) for pod in (*self.servers, self.router)]}",
        )

    def upgrade(self):
        """``kubectl rollout restart``: the last server first, the next one when it has been ready for a while."""
        wait_s = self.documents["StatefulSet", "banyan"]["spec"]["minReadySeconds"]
        took = []
        for number in reversed(range(2)):
            took.append(self.servers[number].end())
            self.servers[number] = self.start_server(number)
            nodes.wait_until(lambda: self.servers[number].is_ready, START_S, f"banyan-{number} is ready")  # noqa: B023
            time.sleep(wait_s)
        return took

    def end(self):
        for pod in (self.router, *self.servers):
            pod.end(grace_s=30)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pods")
    # What a user that is not root has to reach; pytest makes it for itself alone.
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    deployment = Deployment(folder)
    try:
        deployment.wait_until_ready()
        yield deployment
    finally:
        deployment.end()


def status_lines(pod):
    done = pod.execute("cat", "/proc/1/status")
    assert done.returncode == 0, done.stderr
    return dict(line.split(":\t", 1) for line in done.stdout.splitlines() if ":\t" in line)


def test_pods_when_they_are_ready_then_their_processes_have_what_the_specification_leaves_them(deployment):
    for pod in (*deployment.servers, deployment.router):
        said = status_lines(pod)
        added = pod.container["securityContext"]["capabilities"].get("add", [])
        assert said["NoNewPrivs"] == "1" and int(said["CapBnd"], 16) == sum(1 << 14 for name in added), said["CapBnd"]
        assert (said["Seccomp"] == "2") is (nodes.seccomp() is not None)
        assert said["Uid"].split()[0] == "1000" and int(said["CapEff"], 16) == 0
        limits = pod.execute("cat", "/proc/1/limits").stdout
        assert re.search(rf"Max locked memory +{container.MEMLOCK_BYTES} ", limits)
    assert deployment.servers[0].execute("cat", "/proc/1/comm").stdout == "tini\n"
    assert deployment.router.execute("touch", "/x").returncode != 0
    assert deployment.servers[0].execute("touch", "/models/x").returncode != 0
    size = deployment.servers[0].execute("df", "-k", "--output=size", "/dev/shm").stdout.split()[-1]
    assert int(size) == 256 << 10
    assert all(pod.num_restarts == 0 for pod in (*deployment.servers, deployment.router))


def test_doctor_when_it_looks_at_a_server_s_container_then_it_finds_what_the_pod_gives(deployment):
    said = deployment.servers[0].execute("banyan", "doctor").stdout
    assert "ok   memory of another process: can be opened" in said and "/dev/shm: 25" in said, said


def test_ranks_when_they_are_processes_of_one_container_then_one_finds_what_another_has_computed(deployment):
    for server, ids in zip(deployment.servers, traffic.prompts(2, 2), strict=True):
        first = traffic.generate(server.url, ids, routed_dp_rank=0)
        again = traffic.generate(server.url, ids, routed_dp_rank=1)
        assert first["meta_info"]["cached_tokens"] == 0
        assert again["meta_info"]["cached_tokens"] >= traffic.PROMPT_TOKENS - traffic.PAGE_TOKENS
        assert again["output_ids"] == first["output_ids"]


def test_upgrade_when_requests_go_on_then_none_fails_and_the_caches_are_found_again(deployment):
    url = deployment.router.url
    # The router weighs a tiny model's prefills against queues: any prompt may come to any server.
    for server in deployment.servers:
        assert not traffic.once(server.url, PROMPTS).failures
    before = traffic.once(url, PROMPTS)
    assert not before.failures and before.cached_share >= 0.9, before
    # One that a server has begun when it is told to end.
    with ThreadPoolExecutor(1) as pool, traffic.Steady(url, PROMPTS) as steady:
        long = pool.submit(traffic.generate, deployment.servers[1].url, PROMPTS[0], num_tokens=LONG_TOKENS)
        time.sleep(2.0)
        assert not long.done()
        took = deployment.upgrade()
    assert len(long.result()["output_ids"]) == LONG_TOKENS
    after = traffic.once(url, PROMPTS)
    report = {
        "num_during": steady.sent.num_answered,
        "failures": [*steady.sent.failures, *after.failures],
        "cached_share": {
            "before": before.cached_share,
            "during": steady.sent.cached_share,
            "after": after.cached_share,
        },
        "longest_s": {"during": steady.sent.most_s, "after": after.most_s},
        "servers_ended_s": took,
        "servers": [pod.said for pod in deployment.servers],
    }
    (ROOT / "build" / "deploy" / "upgrade.json").write_text(json.dumps(report, indent=1))
    assert not report["failures"], report
    assert after.cached_share >= 0.9, report
    assert max(took) < deployment.servers[0].spec["terminationGracePeriodSeconds"], report


def ranks_of(server):
    """Their processes."""
    ranks = [pid for pid in server.processes() if "schedul" in Path(f"/proc/{pid}/comm").read_text()]
    assert len(ranks) == 2
    return ranks


def test_rank_when_it_stands_still_then_its_server_is_not_ready_and_is_started_again(deployment):
    server = deployment.servers[0]
    os.kill(ranks_of(server)[1], signal.SIGSTOP)
    began_s = time.monotonic()
    # Some of what is asked meanwhile reaches it: SGLang's own answer is well all the same.
    unready_s = nodes.wait_until(lambda: not server.watched.is_ready, 180, f"it is not ready: {server.said}")
    assert traffic.status_of(f"{server.url}/health") == 200
    assert traffic.status_of(f"{server.url}/health_ranks") == 503
    asked = traffic.once(deployment.router.url, PROMPTS[:6])
    assert not asked.failures, "the router has another server, and the server another rank"
    nodes.wait_until(lambda: server.num_restarts == 1, 500, f"its container is started again: {server.said}")
    deployment.wait_until_ready()
    report = {"unready_s": unready_s, "ready_again_s": time.monotonic() - began_s, "said": server.said}
    (ROOT / "build" / "deploy" / "stopped_rank.json").write_text(json.dumps(report, indent=1))
    again = traffic.once(deployment.router.url, PROMPTS)
    assert not again.failures and again.cached_share >= 0.9, again


def test_rank_when_it_dies_then_its_servers_container_ends_with_an_error_and_is_started_again(deployment):
    server = deployment.servers[1]
    os.kill(ranks_of(server)[1], signal.SIGKILL)
    nodes.wait_until(lambda: server.num_restarts == 1, 120, f"its container is started again: {server.said}")
    assert any("it ended with 137" in line for _, line in server.said), server.said
    deployment.wait_until_ready()
