"""The API process's questions to the engine process: load or unload a model, and, for the page, the doctor's report and a plan
by the ring's present measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from mdi.control.reach import Reach, Route
from mdi.engine.recorder import Activity
from mdi.errors import MdiError, PlacementError
from mdi.host.diagnosis import NodeFinding, Report
from mdi.host.doctor import reach_nodes, starter_finding
from mdi.placement.model import ModelShape, Workload
from mdi.placement.model_shape import model_shape
from mdi.placement.plan import format_plan, plan
from mdi.placement.profile import ClusterProfile, LinkProfile, NodeProfile
from mdi.serve.snapshot import node_state
from mdi.units import counted

if TYPE_CHECKING:
    from mdi.run.run import Run
    from mdi.serve.host import ModelHost
    from mdi.serve.snapshot import Snapshots

Handler = Callable[[dict[str, Any]], dict[str, Any]]
DOCTOR_S = 3.0
WORTH = 1.05  # a smaller gain is within the error of the measurement
FAST_BYTES_S = 125e6  # a link that is not full does not show its speed: assume a gigabit


def handlers(host: ModelHost, snapshots: Snapshots) -> dict[str, Handler]:
    """Handlers by name; each runs in a thread of its own, and returns plain JSON or raises MdiError."""

    def node(args: dict[str, Any]) -> Run | None:
        loaded = host.loaded.get(args["model"])
        return None if loaded is None else loaded.run

    return {
        "load": lambda args: {"code": _want(host, args["model"], True)},
        "unload": lambda args: {"code": _want(host, args["model"], False)},
        "doctor": lambda args: doctor(node(args)),
        "plan": lambda args: plan_now(node(args), snapshots.latest.get(args["model"], {})),
    }


def _want(host: ModelHost, model: str, is_wanted: bool) -> str:
    """Why it could not be done, as the code of an error; "" if it is done."""
    try:
        host.want(model, is_wanted)
    except MdiError as e:
        return e.code
    return ""


def doctor(node: Run | None) -> dict[str, Any]:
    """Problems of a running ring's nodes: whether each answers, its version, clock, memory, disk."""
    if node is None:
        return {"problems": [], "text": "No ring is running."}
    own = starter_finding(node.cluster.starter, {}, None)
    starter = replace(own, status={**own.status, "state": "RUNNING"})
    findings = (starter, *reach_nodes(node.cluster, DOCTOR_S, {}))
    report = Report(tuple(_in_this_ring(finding, node.trouble) for finding in findings), ())
    return {**report.to_json(), "text": str(report)}


def _in_this_ring(finding: NodeFinding, trouble: str) -> NodeFinding:
    """A node that is busy with the very ring that asks is as it should be, and says nothing at its ring port."""
    if not finding.status:
        return finding
    state = node_state(str(finding.status.get("state")), trouble)
    if finding.status.get("state") != "RUNNING":
        return replace(finding, status={**finding.status, "state": state})
    route = finding.route if finding.route.ring.is_ok else Route(finding.route.control, Reach())
    return replace(finding, status={**finding.status, "state": state}, route=route)


def plan_now(node: Run | None, ring: dict[str, Any]) -> dict[str, Any]:
    """The best placement of the blocks, if nodes and links stay as fast as they are now.

    The times of a frame on each node are those of the run so far, so a ring that has done nothing yet cannot be planned.
    """
    if node is None or not ring:
        return {"error": "No ring is running."}
    if any(not one["frames"] or not one["memory"] for one in ring["nodes"]):
        return {"error": "The nodes have not computed enough yet: ask for a text first."}
    if node.is_shared:
        return {
            "error": "Nodes of this ring compute blocks together: only where each has blocks of its own is another cut planned."
        }
    running = max(1, ring["texts"]["running"])
    shape = model_shape(node.model.weights.config, node.model.format, node.model.computing.kv_dtype)
    profile = profile_now(node, ring, shape)
    work = Workload(running, node.max_length, replay_bytes=node.replay_bytes)
    try:
        report = plan(profile, shape, work, measured=shape)
        as_it_is = plan(profile, shape, work, layers=[one["blocks"][1] - one["blocks"][0] for one in ring["nodes"]])
    except PlacementError as e:
        return {"error": f"{e}"}
    except MdiError as e:
        return {"error": f"this ring cannot be planned: {e}"}
    gain, texts = report.tokens_s / as_it_is.tokens_s, counted(running, "text")
    words = f"For {texts} at once the blocks lie as they should."
    if gain >= WORTH:
        words = f"For {texts} at once another cut would be {gain:.2f} times as fast, by what the nodes measure now:"
    return {"words": words, "text": format_plan(report), "plan": report.to_json()}


def profile_now(node: Run, ring: dict[str, Any], shape: ModelShape) -> ClusterProfile:
    """The cluster as the running ring shows it; rows are those of the frames that were running."""
    rows = max(1, ring["texts"]["running"] // len(ring["nodes"]))
    machines = Counter(one["addr"] for one in ring["nodes"])
    head_s = _head_s(node)
    nodes = tuple(
        _profile_of(one, rows, 0.0 if i else head_s, machines[one["addr"]]) for i, one in enumerate(ring["nodes"])
    )
    links = tuple(
        LinkProfile(one["source"], one["target"], 2 * one["delay_s"], max(one["bytes_s"] or 0.0, FAST_BYTES_S))
        for one in ring["links"]
        if one["delay_s"] is not None
    )
    return ClusterProfile(
        nodes=nodes,
        links=links,
        model=node.model.weights.model,
        config_hash=shape.config_hash,
        format=node.model.format,
    )


def _head_s(node: Run) -> float:
    """Recent seconds per frame of the starter's head; 0 if unknown."""
    spans = [] if node.run_trace is None else node.run_trace.recorder.buffer.last()
    heads = [span.duration_ns / 1e9 for span in spans if span.activity == Activity.HEAD]
    return median(heads) if heads else 0.0


def _profile_of(one: dict[str, Any], rows: int, head_s: float, n_sharing: int) -> NodeProfile:
    """A profile whose blocks take the time of the node's frames, without the head."""
    n_blocks = one["blocks"][1] - one["blocks"][0]
    frame_s = one["compute_s"] / one["frames"]
    block_s = max(frame_s - head_s, 0.05 * frame_s) / max(1, n_blocks)
    memory = one["memory"]
    return NodeProfile(
        name=one["name"],
        device=one["device"] or "cpu",
        n_cores=1.0,
        memory_bytes=int(memory["available_bytes"]) // n_sharing + int(memory["rss_bytes"]),
        disk_bytes=0,
        disk_read_bytes_s=0.0,
        read_bytes_s=0.0,
        block_s=((rows, block_s),),
        head_s=((rows, head_s),) if head_s else (),
        process_bytes=0,
    )
