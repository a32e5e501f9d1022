"""The doctor: healthy clusters, and ill ones of every kind, by real sockets where a test can make them ill."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mdi.control.reach
from cluster_keys import key_file
from mdi import cli
from mdi.cli import launch
from mdi.control.client import ControlClient
from mdi.control.discovery import Guests
from mdi.control.messages import CONTROL_VERSION, ProbeRequest
from mdi.control.reach import PROBLEMS, Reach, Route, bandwidth, greet, knock, try_node
from mdi.control.server import open_ports
from mdi.errors import ControlError
from mdi.host.diagnosis import CLOCK_LIMIT_S, LinkFinding, NodeFinding, Problem, Report
from mdi.host.doctor import examine
from mdi.kernels import library
from mdi.net.invitation import GuestNode
from mdi.node.runs import Runs
from mdi.node.secondary import SecondaryNode
from mdi.run.local import free_ports
from mdi.spec.cluster import ClusterConfig, NodeConfig
from secondaries import cluster_of, entry_of, secondaries
from tiny_checkpoint import write_checkpoint

NODE = NodeConfig("secondary0", "192.168.1.11", 8088, 5088)
WELL = Route(Reach(round_trip_s=1e-4), Reach(round_trip_s=1e-4))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SecondaryNode]]:
    with secondaries(2, tmp_path_factory.mktemp("two")) as nodes:
        yield nodes


def request_of(config: NodeConfig, measure: bool = False) -> ProbeRequest:
    return ProbeRequest(config.name, config.addr, config.port, config.port_in, measure)


@contextlib.contextmanager
def server(answer: bytes | None) -> Iterator[int]:
    """A port on which something else answers; None: it takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ending = threading.Event()
        kept: list[socket.socket] = []

        def run() -> None:
            while not ending.is_set():
                try:
                    sock, _ = listening.accept()
                except OSError:
                    return
                kept.append(sock)
                if answer is not None:
                    with contextlib.suppress(OSError):
                        sock.settimeout(5)
                        sock.recv(65536)
                        sock.sendall(answer)
                    sock.close()

        thread = threading.Thread(target=run, name="stranger", daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        ending.set()
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        for sock in kept:
            sock.close()


# Reaching a node


def test_a_node_that_is_well(two: list[SecondaryNode]) -> None:
    route = try_node(request_of(entry_of(two[0]), measure=True))
    assert route.is_ok and route.status is not None and route.status["name"] == "secondary0"
    assert 0 < route.control.round_trip_s < 1 and 0 < route.ring.round_trip_s < 5
    assert route.ring.bytes_s > 1e6
    assert abs(route.clock_skew_s) < 30
    assert Route.from_json(json.loads(json.dumps(route.to_json()))) == replace(route, status=None, clock_skew_s=0.0)


def test_ports_where_nothing_listens(two: list[SecondaryNode]) -> None:
    (free,) = free_ports(1)
    assert knock("127.0.0.1", free, 5).problem == "refused"
    assert greet("127.0.0.1", free, "secondary0", 5).problem == "refused"
    route = try_node(request_of(entry_of(two[0], port_in=free)))
    assert (route.control.problem, route.ring.problem) == ("", "refused")
    route = try_node(request_of(entry_of(two[0], port=free)))
    assert (route.control.problem, route.ring.problem) == ("refused", ""), "the ring goes another way"


@pytest.mark.parametrize("name", ["no-such-host.invalid", "..", "\u2603" * 70])
def test_a_name_that_nobody_knows(name: str) -> None:
    assert knock(name, 80, 5).problem == "name"
    assert greet(name, 80, "", 5).problem == "name"
    route = try_node(ProbeRequest("secondary0", name, 80, 81))
    assert (route.control.problem, route.ring.problem) == ("name", "name")


@pytest.mark.parametrize("answer", [b"HTTP/1.0 200 OK\r\n\r\n<html>", b"SSH-2.0-OpenSSH_9.2\r\n", b"\0" * 4096])
def test_something_else_answers(two: list[SecondaryNode], answer: bytes) -> None:
    with server(answer) as port:
        assert greet("127.0.0.1", port, "", 5).problem == "stranger"
        assert try_node(request_of(entry_of(two[0], port=port))).control.problem in ("stranger", "closed")


def test_something_that_says_nothing(two: list[SecondaryNode]) -> None:
    with server(None) as port:
        assert greet("127.0.0.1", port, "", 0.3).problem == "silent"
        route = try_node(request_of(entry_of(two[0], port=port)), 0.3)
        assert route.control.problem == "silent" and route.ring.is_ok


def test_silence_is_a_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(self: socket.socket, address: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket.socket, "connect", connect)
    assert knock("127.0.0.1", 80, 0.1).problem == "timeout"
    assert greet("127.0.0.1", 80, "", 0.1).problem == "timeout"


def test_the_ring_port_of_another_node(two: list[SecondaryNode]) -> None:
    route = try_node(request_of(entry_of(two[0], port_in=two[1].ring_port)))
    assert route.ring.problem == "other" and "secondary1" in route.ring.detail


def test_a_question_disturbs_no_run(two: list[SecondaryNode], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert greet("127.0.0.1", two[0].ring_port, "secondary0", 5).is_ok
    assert "dropped" not in caplog.text


def test_a_node_is_asked_for_its_way_to_another(two: list[SecondaryNode]) -> None:
    client = ControlClient(entry_of(two[0]))
    route = Route.from_json(client.probe(request_of(entry_of(two[1]), measure=True)))
    assert route.is_ok and route.ring.bytes_s > 1e6
    (free,) = free_ports(1)
    route = Route.from_json(client.probe(request_of(entry_of(two[1], port=free, port_in=free))))
    assert (route.control.problem, route.ring.problem) == ("refused", "refused")


@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.1 500 Oh\r\nContent-Length: 20\r\n\r\n{"error": "A SECRET"}',
        b"HTTP/1.1 500 A SECRET\r\nContent-Length: 2\r\n\r\n{}",
        b"A SECRET that is no HTTP\r\n",
    ],
)
def test_what_another_service_says_is_not_told_on(two: list[SecondaryNode], answer: bytes) -> None:
    """A node tries any address that it is asked to: that must not make it a reader of services that only it can reach."""
    with server(answer) as port:
        found = ControlClient(entry_of(two[0])).probe(request_of(entry_of(two[1], port=port, port_in=port)))
    assert "SECRET" not in json.dumps(found) and "SECR" not in json.dumps(found)
    assert found["control"]["problem"] in ("stranger", "closed") and found["ring"]["problem"] == "stranger"
    assert found["control"]["detail"] == found["ring"]["detail"] == ""


def test_a_node_in_a_run_measures_nothing(two: list[SecondaryNode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runs, "active", [SimpleNamespace(is_running=True, state="RUNNING")])
    client = ControlClient(entry_of(two[0]))
    for ask in (lambda: client.probe(request_of(entry_of(two[1]))), lambda: client.echo(10)):
        with pytest.raises(ControlError) as caught:
            ask()  # type: ignore[no-untyped-call]
        assert (caught.value.status, caught.value.code) == (409, "busy")
    assert bandwidth(client) == 0.0
    monkeypatch.undo()


@pytest.mark.parametrize(
    "answer",
    [{}, {"control": 5, "ring": None}, {"control": {"problem": "x"}}, [],
     {"control": {"problem": "new", "detail": "", "round_trip_s": 0, "bytes_s": 0}, "ring": {}}],
)  # fmt: skip
def test_an_answer_that_cannot_be_read(answer: Any) -> None:
    with pytest.raises(ControlError):
        Route.from_json(answer)


# Whole clusters


def test_a_cluster_that_is_well(two: list[SecondaryNode], tmp_path: Path) -> None:
    report = examine(cluster_of(two), cache_dir=tmp_path)
    assert report.is_ok, str(report)
    ways = {(link.source, link.target.name): link for link in report.links}
    names = ("starter", "secondary0", "secondary1")
    assert set(ways) == {(a, b) for a in names for b in names if a != b}, "every neighbour, in both directions"
    for (source, target), link in ways.items():
        assert link.route.ring.is_ok
        in_ring = names.index(target) == (names.index(source) + 1) % 3
        assert link.in_ring == in_ring and bool(link.route.ring.bytes_s) == in_ring
    text = str(report)
    assert "No problems found." in text and "secondary0 -> secondary1" in text and "Mbit/s" in text
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_a_cluster_of_one(tmp_path: Path) -> None:
    report = examine(ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0)), cache_dir=tmp_path)
    assert report.is_ok and report.links == () and len(report.nodes) == 1


def test_a_device_of_the_starter_that_is_not_there(two: list[SecondaryNode]) -> None:
    cluster = cluster_of(two)
    report = examine(replace(cluster, starter=replace(cluster.starter, device="cuda:9")))
    (problem,) = report.problems
    assert problem.node == "starter" and "has no device cuda:9, as the nodes file says, only cpu" in problem.what


def test_a_node_that_is_not_there(two: list[SecondaryNode]) -> None:
    cluster = cluster_of(two)
    ports = free_ports(2)
    gone = replace(cluster.secondaries[1], port=ports[0], port_in=ports[1])
    report = examine(replace(cluster, secondaries=(cluster.secondaries[0], gone)))
    assert [problem.node for problem in report.problems] == ["secondary1"], "it is told once, not by every neighbour"
    assert "nothing listens there" in report.problems[0].what
    assert "Start mdi secondary there" in report.problems[0].advice


def test_a_wrong_ring_port_is_told_with_the_right_one(two: list[SecondaryNode]) -> None:
    cluster = cluster_of(two)
    (free,) = free_ports(1)
    wrong = replace(cluster.secondaries[0], port_in=free)
    report = examine(replace(cluster, secondaries=(wrong, cluster.secondaries[1])))
    assert [problem.node for problem in report.problems] == ["secondary0"]
    assert f"listens on {two[0].ring_port}" in report.problems[0].advice


def test_a_starter_whose_port_is_taken(two: list[SecondaryNode]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cluster = replace(cluster_of(two), starter=NodeConfig("starter", "127.0.0.1", 0, taken.getsockname()[1]))
        report = examine(cluster)
    assert any(p.node == "starter" and "cannot listen on" in p.what for p in report.problems)


def test_a_node_in_another_run(two: list[SecondaryNode], monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"state": "RUNNING", "error": None, "error_code": None, "looking": None, "loading": None}
    ring: Any = SimpleNamespace(run="a run", has_ended=threading.Event(), received_bytes=0, total_bytes=0, **fields)
    two[0].runs.add(ring)
    report = examine(cluster_of(two))
    assert [problem.node for problem in report.problems] == ["secondary0"]
    assert "another run" in report.problems[0].what
    ring.state = "READY"
    ring.has_ended.set()


# What is said about what was found


def report_of(node: NodeConfig = NODE, route: Route = WELL, needed: int = 0, **status: Any) -> list[Problem]:
    full = {
        "name": node.name,
        "state": "IDLE",
        "version": mdi.__version__,
        "control_version": CONTROL_VERSION,
        "memory": {"available_bytes": 4 << 30},
        "disk_free_bytes": 4 << 30,
        **status,
    }
    return list(Report((NodeFinding(node, route, full, needed),), ()).problems)


def test_what_a_node_says_of_itself() -> None:
    assert report_of() == []
    for words, changes in (
        ("version", {"version": "1.0"}),
        (f"control protocol {CONTROL_VERSION + 1}", {"control_version": CONTROL_VERSION + 1}),
        ("no kernels", {"arithmetic": "torch"}),
        ("another run", {"state": "LOADING"}),
        ("compiles its kernels", {"state": "COMPILING", "arithmetic": None, "kernels": "compiling"}),
        ("another run", {"measuring": {"what": "disk", "done": 0, "total": 9}}),
        ("memory", {"memory": {"available_bytes": 100 << 20}}),
        ("disk", {"disk_free_bytes": 1000}),
        ("a starter answers", {"samples": [], "n_nodes": 3}),
    ):
        (problem,) = report_of(**changes)
        assert words in problem.what and problem.advice and problem.node == "secondary0"
    for words, node, changes in (
        ("has no device cuda:1, as the nodes file says, only cpu, cuda:0", replace(NODE, device="cuda:1"), {}),
        ("has no device mps", replace(NODE, device="mps"), {}),
        ("device cpu, but the nodes file here says cuda", replace(NODE, device="cuda"), {"own": {"device": "cpu"}}),
        (
            "device cuda:1, but the nodes file here says cuda",
            replace(NODE, device="cuda"),
            {"own": {"device": "cuda:1"}},
        ),
        ("threads 2, but the nodes file here says 4", replace(NODE, threads=4), {"own": {"threads": 2}}),
    ):
        (problem,) = report_of(node, devices=["cpu", "cuda:0"], **changes)
        assert words in problem.what and problem.advice
    fine = replace(NODE, device="cuda", threads=4)
    assert report_of(fine, devices=["cpu", "cuda:0"], own={"device": None, "threads": 4}) == []
    assert report_of(fine, devices=["cpu", "cuda:0"], own={"device": "cuda:0"}) == []
    assert report_of(replace(NODE, device="auto"), devices="none", own=7) == []
    (problem,) = report_of(needed=5 << 30, disk_free_bytes=9 << 30)
    assert "4.3 GB of memory free, but 5.4 GB of weights" in problem.what
    assert report_of(needed=3 << 30) == []


@pytest.mark.parametrize(("skew", "words"), [(CLOCK_LIMIT_S + 10, "15.0 s ahead"), (-3600.0, "1:00 h behind")])
def test_a_clock_that_is_wrong(skew: float, words: str) -> None:
    (problem,) = report_of(route=replace(WELL, clock_skew_s=skew))
    assert words in problem.what and "NTP" in problem.advice
    assert report_of(route=replace(WELL, clock_skew_s=CLOCK_LIMIT_S / 2)) == []


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p != "untried"])
def test_each_problem_of_a_port_has_its_advice(problem: str) -> None:
    ill = Reach(problem, "the system's words")
    advices = set()
    for route in (Route(ill, ill), replace(WELL, ring=ill)):
        (found,) = list(Report((NodeFinding(NODE, route, {}),), ()).problems)
        assert PROBLEMS[problem] in found.what and "192.168.1.11" in found.what and "the system's words" in found.what
        assert found.advice and found.advice != "Try again"
        advices.add(found.advice)


def test_a_node_with_another_key_does_not_hang() -> None:
    """Its ring port has answered, so the silence of its control port is no reason to start it again."""
    route = Route(Reach("silent"), Reach("key"))
    (problem,) = Report((NodeFinding(NODE, route, {}),), ()).problems
    assert PROBLEMS["key"] in problem.what and "--key FILE" in problem.advice
    for other in ("refused", "closed", "stranger"):
        assert len(Report((NodeFinding(NODE, replace(route, control=Reach(other)), {}),), ()).problems) == 2
    assert len(Report((NodeFinding(NODE, replace(WELL, control=Reach("silent")), {}),), ()).problems) == 1


def test_a_link_that_is_shut_though_the_starter_gets_through() -> None:
    starter, other = NodeConfig("starter", "192.168.1.10", 8088, 5088), replace(NODE, name="secondary1")
    nodes = tuple(NodeFinding(node, WELL, {}) for node in (starter, NODE, other))
    shut = replace(WELL, ring=Reach("timeout"))
    (problem,) = Report(nodes, (LinkFinding("secondary0", other, shut),)).problems
    assert problem.node == "secondary0" and "cannot reach secondary1's ring port" in problem.what
    assert "firewall" in problem.advice and "5088" in problem.advice
    (problem,) = Report(nodes, (LinkFinding("secondary0", other, shut, in_ring=False),)).problems
    assert "does not need it" in problem.what
    local = replace(starter, addr="127.0.0.1")
    (problem,) = Report(nodes, (LinkFinding("secondary1", local, shut),)).problems
    assert "means each machine itself" in problem.advice
    # a control port that only the starter is let in to is no harm: frames do not go there
    one = replace(WELL, control=Reach("timeout"))
    assert Report(nodes, (LinkFinding("secondary0", other, one),)).is_ok


def test_what_could_not_be_asked() -> None:
    link = LinkFinding("secondary0", NODE, WELL, failure="secondary0 does not answer")
    (problem,) = Report((), (link,)).problems
    assert problem.advice == "secondary0 does not answer"


@pytest.mark.slow
def test_the_machines_of_the_users_key_are_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a word: those that have joined once are known by the file beside the key that was made or fetched."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(cli, "default_nodes_config", lambda: tmp_path / "none.json")
    monkeypatch.delenv("MDI_KEY_FILE", raising=False)
    assert launch("doctor", []) == 2
    error = capsys.readouterr().err
    assert "no key at" in error and error.count("\n") == 1
    (tmp_path / "mdi-llm").mkdir()
    keys = key_file(tmp_path / "mdi-llm" / "cluster.key")
    quiet = SimpleNamespace(nodes=list, close=lambda: None)  # nothing is announced in the network of the tests
    monkeypatch.setattr("mdi.control.mdns.Browser", lambda *_: quiet)
    assert launch("doctor", ["--addr", "127.0.0.1"]) == 2 and "no node of the key" in capsys.readouterr().err
    with secondaries(1, tmp_path, keys=keys) as (node,):
        Guests(keys.path.with_name("cluster.key.nodes")).add(
            GuestNode("pi", "127.0.0.1", node.control_port, node.ring_port), "127.0.0.1"
        )
        assert launch("doctor", ["--addr", "127.0.0.1"]) == 0
    printed = capsys.readouterr()
    assert "No problems found." in printed.out and f"secondary0 is pi at 127.0.0.1:{node.control_port}" in printed.err


def test_an_open_port_is_a_node_that_takes_nothing() -> None:
    with open_ports(NodeConfig("starter", "127.0.0.1", 0, 0)) as (port, port_in):
        route = try_node(ProbeRequest("starter", "127.0.0.1", port, port_in, measure=True))
        assert route.is_ok and route.ring.bytes_s > 1e6
        with pytest.raises(ControlError) as caught:
            ControlClient(NodeConfig("starter", "127.0.0.1", port, port_in)).probe(request_of(NODE))
        assert caught.value.code == "role"


# The command


@pytest.mark.slow
def test_the_command(two: list[SecondaryNode], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ports = free_ports(2)
    entries = [
        {"addr": "127.0.0.1", "communication": {"port": port}, "inference": {"port_in": port_in}}
        for port, port_in in ((ports[0], ports[1]), *((n.control_port, n.ring_port) for n in two))
    ]
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps({"nodes": {"starter": entries[0], "secondary": entries[1:]}}))
    assert launch("doctor", ["--nodes-config", str(path)]) == 0
    told = capsys.readouterr().out
    assert "No problems found." in told
    assert [line.split().count(library.instruction_set()) for line in told.splitlines()[1:4]] == [1, 1, 1]
    folder = write_checkpoint(tmp_path / "tiny")
    assert launch("doctor", ["--nodes-config", str(path), "--ckpt", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    entries[2]["communication"] = {"port": free_ports(1)[0]}
    path.write_text(json.dumps({"nodes": {"starter": entries[0], "secondary": entries[1:]}}))
    assert launch("doctor", ["--nodes-config", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and found["problems"][0]["node"] == "secondary1"
    assert launch("doctor", ["--nodes-config", str(path), "--deadline", "0"]) == 2
    assert launch("doctor", ["--nodes-config", str(tmp_path / "none.json")]) == 2
