"""The control plane: a real server with a node that only remembers, bad requests of every kind, and the client's errors."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import queue
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdi.cancel import Cancel
from mdi.control import server as admission_module
from mdi.control.client import ControlClient
from mdi.control.messages import CONTROL_VERSION, InitRequest, PartSpec, ProfileRequest
from mdi.control.reach import reach_node
from mdi.control.server import JSON_LIMIT_BYTES, ControlServer, StatusOnly
from mdi.errors import CheckpointError, Code, ControlError, MdiError, NodeLostError, RingError, UsageError
from mdi.kernels import LAYOUT_VERSION
from mdi.model.plain import ModelConfig
from mdi.run.local import free_ports
from mdi.spec.cluster import NodeConfig
from mdi.spec.extent import Extent
from mdi.spec.model_id import ModelId
from mdi.stages.model_family import ModelFamily
from waiting import until_gone

DEADLINE_S = 30.0
DATA = bytes(range(256)) * 8192  # 2 MiB
PART = PartSpec("block.1", hashlib.sha256(DATA).hexdigest(), len(DATA))
RUN = "0123456789abcdef"
REQUEST = InitRequest(
    run=RUN,
    epoch=RUN,
    index=1,
    names=("starter", "secondary0", "secondary1"),
    placement="a" * 64,
    next_addr="127.0.0.1",
    next_port=5002,
    model=ModelId("tiny", ModelConfig(n_layer=5, name="tiny"), "c" * 64, "float32"),
    blocks=(1, 3),
    parts=(PART, PartSpec("block.2", "b" * 64, 7)),
    extent=Extent(100),
)


class FakeNode:
    """Remembers what it was asked, and raises what it is told to."""

    def __init__(self) -> None:
        self.calls: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.error: Exception | None = None

    def _note(self, *call: Any) -> None:
        self.calls.put(call)
        if self.error is not None:
            raise self.error

    def status(self, run: str | None) -> dict[str, Any]:
        self._note("status", run)
        return {"state": "IDLE"}

    def init(self, request: InitRequest) -> dict[str, Any]:
        self._note("init", request)
        return {"missing": [part.name for part in request.parts]}

    def stop(self, run: str, leave: bool, ring: str | None = None) -> None:
        self._note("stop", run, leave)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeNode, ControlServer]]:
    node = FakeNode()
    server = ControlServer(node, "127.0.0.1", 0, "secondary0")
    yield node, server
    server.close()


@pytest.fixture
def node(served: tuple[FakeNode, ControlServer]) -> FakeNode:
    one = served[0]
    while not one.calls.empty():
        one.calls.get_nowait()
    one.error = None
    return one


@pytest.fixture
def url(served: tuple[FakeNode, ControlServer]) -> str:
    return f"http://127.0.0.1:{served[1].port}"


@pytest.fixture
def client(served: tuple[FakeNode, ControlServer]) -> ControlClient:
    return client_of(served[1].port)


def client_of(port: int) -> ControlClient:
    return ControlClient(NodeConfig("secondary0", "127.0.0.1", port, 0))


def send(method: str, url: str, **kwargs: Any) -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False
        return session.request(method, url, timeout=DEADLINE_S, **kwargs)


def refused(response: requests.Response) -> tuple[int, str]:
    assert response.headers["Content-Type"] == "application/json"
    error = response.json()["error"]
    assert "Traceback" not in error
    return response.status_code, error


def raw(port: int, data: bytes, then_shut: bool = False) -> bytes:
    """Everything that the server answers to bytes that no library would send."""
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as sock:
        sock.sendall(data)
        if then_shut:
            sock.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(65536):
                answer += piece
        return answer


def test_status(node: FakeNode, client: ControlClient) -> None:
    assert client.status() == {"state": "IDLE"}
    assert node.calls.get_nowait() == ("status", None)


def test_init_comes_as_it_was_sent(node: FakeNode, client: ControlClient) -> None:
    assert client.init(REQUEST) == {"missing": ["block.1", "block.2"]}
    assert node.calls.get_nowait() == ("init", REQUEST)


def test_stop(node: FakeNode, client: ControlClient) -> None:
    client.stop(RUN)
    client.stop(RUN, leave=True)
    assert [node.calls.get_nowait() for _ in range(2)] == [("stop", RUN, False), ("stop", RUN, True)]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ControlError("occupied by another run", 409, code=Code.BUSY), 409, "busy"),
        (ControlError("no status given"), 500, "control"),
        (UsageError("you asked for something odd"), 400, "usage"),
        (CheckpointError("the disk is full"), 500, "weights"),
        (NodeLostError("secondary1", "its memory is full", Code.MEMORY), 500, "memory"),
    ],
)
def test_what_a_node_raises_is_the_answer(
    node: FakeNode, client: ControlClient, error: MdiError, status: int, code: str
) -> None:
    node.error = error
    with pytest.raises(ControlError, match=f"secondary0 at 127.0.0.1:[0-9]+: {error}") as caught:
        client.init(REQUEST)
    assert (caught.value.status, caught.value.code) == (status, code)
    assert Code.of(code).travels


def test_every_error_has_a_code_that_the_protocol_names() -> None:
    kinds = [MdiError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert len({kind.code for kind in kinds}) > 8 and all(kind.code.travels for kind in kinds)


def test_a_defect_in_a_node_is_an_answer_without_a_traceback(node: FakeNode, url: str) -> None:
    node.error = ZeroDivisionError("a defect")
    assert refused(send("GET", url + "/"))[0] == 500


@pytest.mark.parametrize(
    ("method", "path", "use"),
    [
        ("POST", "/", "GET"),
        ("PUT", "/", "GET"),
        ("DELETE", "/", "GET"),
        ("GET", "/init", "POST"),
        ("PUT", "/init", "POST"),
        ("GET", "/stop", "PUT"),
        ("POST", "/stop", "PUT"),
    ],
)
def test_a_wrong_method_is_told_the_right_one(node: FakeNode, url: str, method: str, path: str, use: str) -> None:
    response = send(method, url + path, data=b"{}")
    assert refused(response) == (405, f"{method} is not for this address; use {use}")
    assert response.headers["Allow"] == use
    assert node.calls.empty()


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/init/more",
        "/stop/a/b",
        "/a/b/c",
        "/?other=1",
        "/?run=a",
        "/%00",
        "/index/x",
    ],
)
def test_unknown_addresses(node: FakeNode, url: str, path: str) -> None:
    for method in ("GET", "POST", "PUT"):
        assert refused(send(method, url + path, data=b"{}"))[0] in (404, 405)
    assert node.calls.empty()


@pytest.mark.parametrize("path", ["parts/" + "a" * 64 + "?run=x&offset=0", "profile", "probe", "forward", "echo"])
def test_what_older_nodes_call_is_refused_with_the_reason(
    node: FakeNode, served: tuple[FakeNode, ControlServer], path: str
) -> None:
    method = "PUT" if path.startswith(("parts", "echo")) else "POST"
    answer = raw(served[1].port, f"{method} /{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")  # before the body was sent
    assert head.split()[1] == b"404" and json.loads(body)["code"] == "version"
    assert node.calls.empty()


def test_a_body_that_is_too_large_is_refused_unread(node: FakeNode, served: tuple[FakeNode, ControlServer]) -> None:
    head = f"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: {JSON_LIMIT_BYTES + 1}\r\n\r\n".encode()
    answer = raw(served[1].port, head)  # not one byte of the body is sent, and the answer is there
    assert b" 413 " in answer.splitlines()[0] and b"at most 4194304 are accepted here" in answer
    assert node.calls.empty()


def test_a_client_that_sends_too_much_gets_the_answer_as_well(url: str) -> None:
    response = send("POST", url + "/init", data=b" " * (JSON_LIMIT_BYTES + 1))
    assert refused(response)[0] == 413


def test_a_body_at_the_limit_is_read(node: FakeNode, url: str) -> None:
    body = json.dumps(REQUEST.to_json()).encode()
    assert send("POST", url + "/init", data=body.ljust(JSON_LIMIT_BYTES)).status_code == 200


@pytest.mark.parametrize("path", ["POST /init", "PUT /stop"])
def test_a_body_without_a_length_is_refused(served: tuple[FakeNode, ControlServer], path: str) -> None:
    port = served[1].port
    for header in ("", "Transfer-Encoding: chunked\r\n"):
        answer = raw(port, f"{path} HTTP/1.1\r\nHost: x\r\n{header}\r\n0\r\n\r\n".encode())
        assert b" 411 " in answer.splitlines()[0] and b"needs a Content-Length" in answer


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "\xb2", "9" * 5000, "0x10", "+5", "1 1"])
def test_a_length_that_is_none_is_refused(node: FakeNode, served: tuple[FakeNode, ControlServer], length: str) -> None:
    request = f"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{{}}".encode("latin-1")
    status = raw(served[1].port, request, then_shut=True).splitlines()[0].split()[1]
    assert status.startswith(b"4")
    assert node.calls.empty()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"epoch": ' + b"9" * 5000 + b"}",
        b"\x00",
    ],
)
@pytest.mark.parametrize("path", ["POST /init", "PUT /stop"])
def test_a_body_that_is_no_json_is_refused(node: FakeNode, url: str, path: str, body: bytes) -> None:
    method, address = path.split()
    status, error = refused(send(method, url + address, data=body, headers={"Content-Length": str(len(body))}))
    assert status == 400 and "is not JSON" in error
    assert node.calls.empty()


@pytest.mark.parametrize("depth", range(100, 1000, 50))
def test_nesting_of_any_depth_is_refused(node: FakeNode, url: str, depth: int) -> None:
    for key in ("epoch", "control_version", "dtype"):
        deep = b"[" * depth + b"]" * depth
        body = json.dumps({**REQUEST.to_json(), key: "DEEP"}).encode().replace(b'"DEEP"', deep)
        assert refused(send("POST", url + "/init", data=body))[0] in (400, 409)
    assert refused(send("PUT", url + "/stop", data=deep))[0] == 400


def test_a_body_that_is_cut_off_is_refused(node: FakeNode, served: tuple[FakeNode, ControlServer]) -> None:
    answer = raw(served[1].port, b"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{}", then_shut=True)
    assert b" 400 " in answer.splitlines()[0] and b"cut off" in answer
    assert node.calls.empty()


@pytest.mark.parametrize("body", [{}, {"run": 7}, {"run": None}, [], "x", {"leave": True}])
def test_a_stop_without_a_run_is_refused(node: FakeNode, url: str, body: object) -> None:
    assert refused(send("PUT", url + "/stop", json=body)) == (
        400,
        "field 'run': expected the id of the run to end",
    )
    assert node.calls.empty()


def test_headers_without_end_are_refused(served: tuple[FakeNode, ControlServer]) -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-Filler: " + b"y" * 200_000 + b"\r\n\r\n"
    answer = raw(served[1].port, request)
    assert answer == b"" or answer.splitlines()[0].split()[1].startswith(b"4")


FIELDS = sorted(REQUEST.to_json())
OPTIONAL = {
    "dtype",
    "quantize",
    "quantize_head",
    "device",
    "threads",
    "window",
    "group",
    "silence_s",
    "refused_s",
}


# What a node of each version takes, that one of another may not know: raise CONTROL_VERSION with every change.
FIELDS_OF_VERSION = {
    3: (
        "blocks compile config config_hash control_version device dtype epoch exclusive extensions hand_over index "
        "keep_caches kv_dtype layout_version max_length model n_frames n_sequences names next_addr next_port parts placement "
        "quantize replay replay_bytes run silence_s stored_dtype stored_format threads wire_dtype",
        "config config_hash device dtype fresh quantize run slots stored_dtype threads",
    ),
    4: (
        "blocks compile config config_hash control_version device dtype epoch exclusive extensions hand_over index "
        "keep_caches kv_dtype layout_version max_length model n_frames n_sequences names next_addr next_port parts placement "
        "quantize quantize_head replay replay_bytes run silence_s stored_dtype stored_format threads wire_dtype",
        "compile config config_hash device dtype fresh kv_dtype quantize quantize_head run slots stored_dtype threads "
        "wire_dtype",
    ),
    5: (
        "allow_clipping blocks compile config config_hash control_version device dtype epoch exclusive extensions hand_over "
        "index keep_caches kv_dtype layout_version max_length model n_frames n_sequences names next_addr next_port parts "
        "placement quantize quantize_head replay replay_bytes run silence_s stored_dtype stored_format threads wire_dtype",
        "allow_clipping compile config config_hash device dtype fresh kv_dtype quantize quantize_head run slots stored_dtype "
        "threads wire_dtype",
    ),
    6: (
        "allow_clipping blocks compile config config_hash control_version device dtype epoch exclusive extensions hand_over "
        "index keep_caches kv_dtype layout_version max_length model n_frames n_sequences names next_addr next_port parts "
        "placement quantize quantize_head replay replay_bytes run silence_s stored_dtype stored_format threads wire_dtype",
        "allow_clipping compile config config_hash device dtype fresh kv_dtype quantize quantize_head run stored_dtype "
        "threads wire_dtype",
    ),
}
FIELDS_OF_VERSION[7] = FIELDS_OF_VERSION[6]  # what is new are an extension and the ring of /stop
FIELDS_OF_VERSION[8] = FIELDS_OF_VERSION[7]  # parts and measurements are messages on the ring port
FIELDS_OF_VERSION[9] = (
    " ".join(sorted([*FIELDS_OF_VERSION[8][0].split(), "is_hot", "refused_s"])), FIELDS_OF_VERSION[8][1]
)  # fmt: skip
FIELDS_OF_VERSION[10] = FIELDS_OF_VERSION[9]  # tensors that are trained have a message of their own
FIELDS_OF_VERSION[11] = (
    "allow_clipping blocks cache_share compile control_version device dtype epoch exclusive extent gradients group hand_over "
    "index is_ahead is_hot keep_caches keeps_received layout_version model n_spans names next_addr next_port parts "
    "placement quantize quantize_head refused_s replay replay_bytes run silence_s taps threads window wire_dtype",
    "allow_clipping cache_share compile device dtype fresh model n_spans quantize quantize_head run silence_s threads "
    "wire_dtype",
)
FIELDS_OF_VERSION[12] = tuple(" ".join(sorted([*fields.split(), "mlock"])) for fields in FIELDS_OF_VERSION[11])
FIELDS_OF_VERSION[13] = tuple(" ".join(sorted([*fields.split(), "keep_prefixes"])) for fields in FIELDS_OF_VERSION[12])
FIELDS_OF_VERSION[14] = FIELDS_OF_VERSION[13]  # nodes give each other files of kept prefixes
FIELDS_OF_VERSION[15] = FIELDS_OF_VERSION[14]  # caches are filled behind a frame that was passed on
FIELDS_OF_VERSION[16] = FIELDS_OF_VERSION[15]  # nodes of groups answer tasks about prefixes


def test_other_fields_are_another_version() -> None:
    init, profile = FIELDS_OF_VERSION[CONTROL_VERSION]
    assert (FIELDS, sorted(ProfileRequest(REQUEST.model).to_json())) == (init.split(), profile.split())


def test_a_node_of_another_version_is_told_before_anything_else(
    node: FakeNode, url: str, client: ControlClient
) -> None:
    """The starter finds out by the status; a node, whose starter does not look, by the request."""
    body = {"control_version": CONTROL_VERSION + 1, "new": "a field that only the next version knows"}
    status, error = refused(send("POST", url + "/init", json=body))
    assert status == 409 and f"this node version {CONTROL_VERSION}: install the same version" in error
    node.status = lambda run: {"state": "IDLE", "version": "9.9", "control_version": 1}  # type: ignore[method-assign]
    with pytest.raises(
        RingError, match=r"secondary0 at .* runs version 9\.9 .*protocol 1\), this machine .*install the same"
    ):
        reach_node(client, 0.0, Cancel())
    del node.status  # type: ignore[method-assign]


def test_a_node_that_packs_weights_otherwise_is_told(node: FakeNode, url: str) -> None:
    body = {**REQUEST.to_json(), "layout_version": LAYOUT_VERSION + 1}
    status, error = refused(send("POST", url + "/init", json=body))
    assert status == 409 and f"version {LAYOUT_VERSION + 1} of their layout" in error and "install" in error
    assert node.calls.empty()


@pytest.mark.parametrize("key", [key for key in FIELDS if key not in OPTIONAL | {"control_version"}])
def test_a_missing_field_is_named(url: str, key: str) -> None:
    body = REQUEST.to_json()
    del body[key]
    status, error = refused(send("POST", url + "/init", json=body))
    assert status == 400 and error == f"request: the field {key!r} is missing"


@pytest.mark.parametrize("value", [None, True, 1.5, -1, "", [], {}, ["x", 3], [1, 2, 3], "x" * 2000, 10**30], ids=repr)
@pytest.mark.parametrize("key", FIELDS)
def test_a_field_of_another_type_is_named(key: str, value: object) -> None:
    data = {**json.loads(json.dumps(REQUEST.to_json())), key: value}
    try:
        InitRequest.from_json(data)
    except ControlError as e:
        if key == "control_version":
            assert e.status == 409 and "install the same version of MDI-LLM on both" in str(e)
        else:
            assert e.status == 400 and key in str(e)
        assert len(str(e)) < 500
    else:
        of_that_type = {
            "allow_clipping",
            "compile",
            "exclusive",
            "hand_over",
            "is_hot",
            "keep_caches",
            "gradients",
            "is_ahead",
            "keeps_received",
            "mlock",
            "taps",
            "placement",
            "next_addr",
        }
        assert key in of_that_type | OPTIONAL


def of(config: Any) -> dict[str, Any]:
    """The field of a model with another config."""
    return {"model": {**REQUEST.model.to_json(), "config": config}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": [3, 3]}, r"blocks: \[3, 3\] is no range of a model of 5 blocks"),
        ({"blocks": [4, 6]}, r"blocks: \[4, 6\] is no range"),
        ({"blocks": [-1, 2]}, "request.blocks"),
        ({"blocks": [1, True]}, "request.blocks"),
        ({"blocks": [0, 10**12], **of({**ModelConfig().plain(), "n_layer": 10**12})}, "n_layer"),
        ({"blocks": [0, 1000], **of(ModelConfig(n_layer=1000).plain())}, "the listed parts do not match blocks"),
        ({"blocks": [2, 4]}, "the listed parts do not match blocks"),
        (of({}), "config: the field 'name' is missing"),
        (of({**ModelConfig().plain(), "n_layer": "5"}), "n_layer"),
        (
            of({**ModelConfig(n_layer=5).plain(), "n_head": 7}),
            "request.model.config: .*n_head 7 is no multiple",
        ),
        (of({**ModelConfig(n_layer=5).plain(), "newer": 1}), "request.model.config: unknown field 'newer'"),
        (of([]), "request.model.config: expected an object"),
        ({"index": 0}, "request.index"),
        ({"index": 3}, "request.index: .* found 3"),
        ({"epoch": "0123456789ABCDEF"}, "request.epoch"),
        ({"next_port": 0}, "request.next_port"),
        ({"parts": [7]}, "request.parts"),
        ({"parts": [{"name": "block.1", "sha256": "a" * 63, "n_bytes": 1}]}, r"request.parts.*\.sha256"),
        ({"parts": [{"name": "block.1", "sha256": "a" * 64, "n_bytes": 0}]}, r"request.parts.*\.n_bytes"),
        (
            {"control_version": 1},
            f"the starter speaks version 1 of the control protocol, this node version {CONTROL_VERSION}",
        ),
    ],
)
def test_values_that_contradict_each_other(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ControlError, match=message):
        InitRequest.from_json({**json.loads(json.dumps(REQUEST.to_json())), **change})


def test_the_head_may_be_the_last_part_and_no_other() -> None:
    """Of a finisher; a node of litgpt's models refuses it."""
    blocks, head = list(REQUEST.parts), PartSpec("head", "d" * 64, 9)
    data = json.loads(json.dumps(REQUEST.to_json()))

    def request(parts: list[PartSpec]) -> InitRequest:
        return InitRequest.from_json({**data, "parts": [vars(part) for part in parts]})

    ModelFamily().check(request(blocks))
    with pytest.raises(ControlError) as caught:
        ModelFamily().check(request([*blocks, head]))
    assert caught.value.code == "role"
    for parts in ([head, *blocks], [*blocks, head, head], [head], [*blocks[:1], head]):
        with pytest.raises(ControlError) as caught:
            request(parts)
        assert (caught.value.status, caught.value.code) == (400, "control")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


def spots(data: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [spot for key, value in items for spot in ((*here, key), *spots(value, (*here, key)))]


GOOD = json.loads(json.dumps(REQUEST.to_json()))


@settings(deadline=None, max_examples=150)
@given(changes=st.lists(st.tuples(st.sampled_from(spots(GOOD)), JSON), min_size=1, max_size=3), whole=st.none() | JSON)
def test_any_json_is_taken_or_refused_with_a_client_error(
    changes: list[tuple[tuple[Any, ...], Any]], whole: Any
) -> None:
    data = copy.deepcopy(GOOD)
    for spot, value in changes:
        where = data
        with contextlib.suppress(TypeError, KeyError, IndexError):  # an earlier change took the place away
            for key in spot[:-1]:
                where = where[key]
            where[spot[-1]] = value
    for candidate in (data, whole):
        try:
            assert isinstance(InitRequest.from_json(candidate), InitRequest)
        except ControlError as e:
            assert e.status in (400, 409)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()),
    path=st.sampled_from(["init", "stop"]),
)
def test_any_body_gets_a_client_error_over_http(node: FakeNode, url: str, body: bytes, path: str) -> None:
    method = "POST" if path == "init" else "PUT"
    response = send(method, f"{url}/{path}", data=body, headers={"Content-Length": str(len(body))})
    if response.status_code != 200:
        assert refused(response)[0] in (400, 409)
    else:
        assert node.calls.get_nowait()[0] == path


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=300),
    prefix=st.sampled_from([b"", b"GET / HTTP/1.1\r\n", b"PUT /stop?", b"POST /init HTTP/1.1\r\n"]),
)
def test_any_bytes_leave_the_server_up(
    served: tuple[FakeNode, ControlServer], client: ControlClient, data: bytes, prefix: bytes
) -> None:
    # What the answer is, is cheroot's affair: to a header that begins with a tab, for one, it is 500.
    raw(served[1].port, prefix + data + b"\r\n\r\n", then_shut=True)
    assert client.status()["state"] == "IDLE"


def test_slow_and_silent_clients_hold_nobody_up(
    node: FakeNode, client: ControlClient, served: tuple[FakeNode, ControlServer]
) -> None:
    address = ("127.0.0.1", served[1].port)
    with contextlib.ExitStack() as stack:
        for data in (b"", b"GET / HT", b"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{") * 4:
            sock = stack.enter_context(socket.create_connection(address, DEADLINE_S))
            sock.sendall(data)
        for _ in range(3):
            assert client.status(timeout_s=DEADLINE_S)["state"] == "IDLE"


def test_a_body_that_stops_coming_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "REQUEST_S", 0.3)
    node = FakeNode()
    server = ControlServer(node, "127.0.0.1", 0, "secondary0")
    try:
        with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as sock:
            sock.sendall(b"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
            while sock.recv(4096):
                pass
        assert node.calls.empty()
    finally:
        server.close()


def test_a_closed_server_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    server = ControlServer(FakeNode(), "127.0.0.1", 0, "secondary0")
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as silent:
        silent.sendall(b"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        client_of(server.port).status()
        server.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), thread.name
    with pytest.raises(ControlError) as caught:
        client_of(server.port).status()
    assert caught.value.problem == "refused"


def test_a_port_in_use_is_told(served: tuple[FakeNode, ControlServer]) -> None:
    port = served[1].port
    message = f"cannot listen on 127.0.0.1:{port} \\(secondary0's communication port\\).*Choose another"
    with pytest.raises(UsageError, match=message):
        ControlServer(FakeNode(), "127.0.0.1", port, "secondary0")
    for addr in ("192.0.2.1", "no-such-host.invalid", "a..b"):
        with pytest.raises(UsageError):
            ControlServer(FakeNode(), addr, 0, "secondary0")


def test_a_starter_answers_status_only() -> None:
    class Starter(StatusOnly):
        def status(self, run: str | None) -> dict[str, Any]:
            return {"state": "RUNNING"}

    server = ControlServer(Starter(), "127.0.0.1", 0, "starter")
    try:
        client = client_of(server.port)
        assert client.status()["state"] == "RUNNING"
        for call in (
            lambda: client.init(REQUEST),
            lambda: client.stop(RUN),
        ):
            with pytest.raises(ControlError) as caught:
                call()
            assert caught.value.status == 409
    finally:
        server.close()


# The client against servers that are not ours


@contextlib.contextmanager
def other_server(answer: bytes | None, n_requests: int = 1) -> Iterator[int]:
    """A server that answers every request alike; None: not at all, and no more than the beginning of it is read."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)

        def run() -> None:
            for _ in range(n_requests):
                sock, _ = server.accept()
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(DEADLINE_S)
                    sock.recv(65536)
                    if answer is None:
                        over.wait(DEADLINE_S)
                    else:
                        sock.sendall(answer)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            thread.join(DEADLINE_S)


def http(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n".encode() + body


NOT_OURS = [
    (http(b"<html>It works!</html>"), "stranger", 200),
    (http(b"[1, 2]"), "stranger", 200),
    (http(b'{"hello": "world"}'), "stranger", None),
    (http(b'{"state": 5}'), "stranger", None),
    (http(b"not here", "404 Not Found"), "stranger", 404),
    (http(b'{"other": 1}', "500 Oh"), "", 500),
    (http(b"", "302 Found", "Location: http://192.0.2.1/\r\n"), "stranger", 302),
    (http(b"\xff\xfe\x00"), "stranger", 200),
    (http(b"[" * 100_000), "stranger", 200),
    (b"", "closed", None),
    (b"SSH-2.0-OpenSSH_9.2\r\n", "stranger", None),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", "closed", None),
]


@pytest.mark.parametrize(("answer", "problem", "status"), NOT_OURS, ids=[str(a[:60]) for a, _, _ in NOT_OURS])
def test_a_server_that_is_not_ours_is_told(answer: bytes, problem: str, status: int | None) -> None:
    with other_server(answer) as port, pytest.raises(ControlError, match="^secondary0 at 127.0.0.1:[0-9]+") as caught:
        client_of(port).status()
    assert (caught.value.problem, caught.value.status) == (problem, status)


def test_nobody_there() -> None:
    (port,) = free_ports(1)
    with pytest.raises(ControlError, match=f"^secondary0 at 127.0.0.1:{port} ") as caught:
        client_of(port).status()
    assert caught.value.problem == "refused"


def test_an_unknown_host() -> None:
    node = NodeConfig("secondary1", "no-such-host.invalid", 80, 0)
    with pytest.raises(ControlError, match="^secondary1 at no-such-host.invalid:80 ") as caught:
        ControlClient(node).status()
    assert caught.value.problem == "name"


@pytest.mark.parametrize("addr", ["a..b", "a" * 300, "with space", "[::1", "\udcff"])
def test_an_address_that_can_be_none(addr: str) -> None:
    with pytest.raises(ControlError) as caught:
        ControlClient(NodeConfig("secondary0", addr, 80, 0)).status()
    assert caught.value.problem == "name"


def test_a_silent_server_is_given_up() -> None:
    with other_server(None) as port, pytest.raises(ControlError) as caught:
        client_of(port).status(timeout_s=0.2)
    assert caught.value.problem == "silent"


def test_proxies_of_the_environment_are_ignored(client: ControlClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://192.0.2.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert client.status()["state"] == "IDLE"


def test_a_strangers_requests_leave_no_traceback(
    served: tuple[FakeNode, ControlServer], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests that contradict themselves, and clients that go away in the middle of a body."""
    port = served[1].port
    caplog.set_level("WARNING")
    chunked = b"POST /init HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n"
    for rest in (b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n"):
        assert raw(port, chunked + rest, then_shut=True).startswith(b"HTTP/1.1 411")
    raw(port, b"\x16\x03\x01\x02\x00 HTTP/9.9\r\n\r\n", then_shut=True)
    head = b"POST /init HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as sock:
        sock.sendall(head + bytes(100))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
    assert send("GET", f"http://127.0.0.1:{port}/").status_code == 200
    assert not caplog.records and "Traceback" not in capsys.readouterr().err


def test_what_the_http_library_says_does_not_reach_the_terminal(served: tuple[FakeNode, ControlServer]) -> None:
    """A log without handlers is written to stderr by Python itself."""
    app = served[1].http.wsgi_app
    handlers = [type(handler) for log in (app.log.error_log, app.log.access_log) for handler in log.handlers]
    assert handlers.count(logging.NullHandler) == 2


def test_a_server_that_was_closed_is_forgotten() -> None:
    """And with it its node, which has the weights of a whole run."""

    class Node(StatusOnly):
        pass

    node = Node()
    known = weakref.ref(node)
    server = ControlServer(node, "127.0.0.1", 0, "starter")
    server.close()
    n_loggers = len(logging.root.manager.loggerDict)
    another = ControlServer(node, "127.0.0.1", 0, "starter")
    another.close()
    assert len(logging.root.manager.loggerDict) == n_loggers
    del node, server, another
    until_gone(known)  # threads of the server may still be on their way out


def of_a_web_page(**headers: str) -> bytes:
    """The head of a request whose body does not come."""
    sent = {
        "Host": "127.0.0.1",
        "Content-Length": "100",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return "".join(
        ["POST /init HTTP/1.1\r\n", *(f"{name}: {value}\r\n" for name, value in sent.items()), "\r\n"]
    ).encode()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "http://127.0.0.1"}, 403),  # of another port: a node has no pages
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8088"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "127.0.0.1@evil.example"}, 403),
        ({"Host": "[evil.example"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "text/plain; application/json"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Type": "multipart/form-data; boundary=x"}, 415),
    ],
)
def test_what_a_web_page_sends_is_refused_unread(
    node: FakeNode, served: tuple[FakeNode, ControlServer], headers: dict[str, str], status: int
) -> None:
    answer = raw(served[1].port, of_a_web_page(**headers))
    assert answer.splitlines()[0].split()[1] == str(status).encode()
    assert node.calls.empty()


def test_a_web_page_under_a_foreign_name_cannot_read_the_status(node: FakeNode, url: str) -> None:
    assert refused(send("GET", url + "/", headers={"Host": "evil.example"}))[0] == 403
    assert node.calls.empty()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:80", "[::1]:80", "[fe80::1%25eth0]:80", "board", socket.gethostname(), ""]
)
@pytest.mark.parametrize(
    "kind", [None, "application/json", "Application/JSON; charset=utf-8", "application/octet-stream"]
)
def test_programs_may_name_the_type_or_not(node: FakeNode, url: str, host: str, kind: str | None) -> None:
    headers = {"Host": host} | ({} if kind is None else {"Content-Type": kind})
    assert send("PUT", url + "/stop", data=json.dumps({"run": RUN}), headers=headers).status_code == 200
    assert node.calls.get_nowait() == ("stop", RUN, False)
