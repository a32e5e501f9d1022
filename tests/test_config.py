"""The nodes file: every documented form is read, every mistake is named with its file and field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdi.errors import UsageError
from mdi.spec.cluster import (
    ClusterConfig,
    load_cluster,
    load_nodes,
    load_secondary,
    nearest_existing,
    parse_bytes,
    parse_cores,
    read_json,
    standalone,
)
from mdi.units import size


def entry(i: int, **more: Any) -> dict[str, Any]:
    return {
        "addr": "127.0.0.1",
        "communication": {"port": 8000 + i, "starter_addr": "127.0.0.1"},
        "inference": {"port_in": 5000 + 2 * i, "port_out": 5001 + 2 * i},
        **more,
    }


def network(n_secondaries: int = 2) -> dict[str, Any]:
    return {"nodes": {"starter": entry(0), "secondary": [entry(i + 1) for i in range(n_secondaries)]}}


def write(folder: Path, data: object) -> Path:
    path = folder / "nodes.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def in_groups(*groups: str | None, **more: Any) -> dict[str, Any]:
    """A network whose nodes are in these groups, starter first; `more` is said of the last one."""
    data = network(len(groups) - 1)
    entries = [data["nodes"]["starter"], *data["nodes"]["secondary"]]
    for one, group in zip(entries, groups, strict=True):
        one |= {} if group is None else {"group": group}
    entries[-1] |= more
    return data


def test_nodes_in_groups(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, in_groups("a", "b", "a", None, "b")))
    assert [node.group for node in cluster.nodes] == ["a", "b", "a", None, "b"]
    assert cluster.n_stages == 3, "so many numbers has --layers"


@pytest.mark.parametrize(
    "data, reason",
    [
        (in_groups("a", "a", "b"), "secondary1 in the group 'b'"),
        (in_groups("a", "a", "a", spare=True), "secondary1 in the group 'a'"),
        (in_groups("a", "a", "a", device="cuda:0"), "secondary1 in the group 'a' has the device cuda:0"),
        (in_groups("a", "a", "secondary0", "secondary0"), "secondary1 in the group 'secondary0'"),
        (in_groups("a", "a", group=7), "secondary[0].group: "),
        (in_groups("a", "a", group=""), "secondary[0].group: "),
    ],
)
def test_groups_that_cannot_be(data: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refusal:
        load_cluster(write(tmp_path, data))
    assert reason in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_whole_network(tmp_path: Path) -> None:
    data = network()
    data["nodes"]["secondary"][1] |= {"device": "cuda:1", "dtype": "bfloat16", "threads": 4, "bind": "0.0.0.0"}
    cluster = load_cluster(write(tmp_path, data))
    assert [node.name for node in cluster.nodes] == ["starter", "secondary0", "secondary1"]
    assert cluster.n_nodes == 3
    last = cluster.secondaries[1]
    assert (last.port, last.port_in, last.port_out) == (8002, 5004, 5005)
    assert (last.device, last.dtype, last.threads, last.listen_addr) == ("cuda:1", "bfloat16", 4, "0.0.0.0")
    assert cluster.starter.listen_addr == "127.0.0.1" and cluster.starter.device is None


def test_standalone_forms(tmp_path: Path) -> None:
    alone = network(0)
    assert load_cluster(write(tmp_path, alone)).secondaries == ()
    del alone["nodes"]["secondary"]
    assert load_cluster(write(tmp_path, alone)).n_nodes == 1
    assert standalone().nodes == (standalone().starter,)


def test_one_secondary_of_a_network_or_alone(tmp_path: Path) -> None:
    path = write(tmp_path, network())
    assert load_secondary(path, 1).port == 8002
    assert load_secondary(path, 1).name == "secondary1"
    assert load_secondary(write(tmp_path, network(1)), None).port == 8001
    path = write(tmp_path, entry(5))
    assert (load_secondary(path, None).name, load_secondary(path, 3).name) == ("secondary0", "secondary3")
    assert load_secondary(path, None).starter_addr == "127.0.0.1"


@pytest.mark.parametrize("index", [None, 2, -1])
def test_a_secondary_that_is_not_listed(tmp_path: Path, index: int | None) -> None:
    with pytest.raises(UsageError) as e:
        load_secondary(write(tmp_path, network()), index)
    assert "2 secondary nodes" in str(e.value) and "0 to 1" in str(e.value)
    with pytest.raises(UsageError):
        load_secondary(write(tmp_path, network(0)), index)


def test_port_out_and_what_is_unknown_are_accepted(tmp_path: Path) -> None:
    data = network()
    del data["nodes"]["starter"]["inference"]["port_out"]
    data["nodes"]["starter"]["comment"] = ["whatever"]
    assert load_cluster(write(tmp_path, data)).starter.port_out is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update(node=data.pop("nodes")), "nodes"),
        (lambda data: data["nodes"].update(secondaries=[]), None),
        (
            lambda data: data["nodes"].update(secondarys=data["nodes"].pop("secondary")),
            "secondarys: .* is secondary meant",
        ),
        (lambda data: data["nodes"]["starter"].update(devise="cpu"), "nodes.starter.devise: .* is device meant"),
        (lambda data: data["nodes"]["secondary"][1].update(thread=2), r"secondary\[1\].thread: .* is threads meant"),
        (
            lambda data: data["nodes"]["secondary"][0]["inference"].update(port_ot=2),
            r"secondary\[0\].inference.port_ot: .* is port_out meant",
        ),
    ],
)
def test_misspelt_fields_are_named(tmp_path: Path, change: Callable[[Any], object], said: str | None) -> None:
    data = network()
    del data["nodes"]["secondary"][0]["inference"]["port_out"]
    change(data)
    if said is None:
        load_cluster(write(tmp_path, data))  # another program's
        return
    with pytest.raises(UsageError, match=said):
        load_cluster(write(tmp_path, data))


def test_a_misspelt_field_of_a_file_of_one_secondary(tmp_path: Path) -> None:
    entry = {**network()["nodes"]["secondary"][0], "kvmemory": "1G", "starter_server": {"addr": "127.0.0.1"}}
    with pytest.raises(UsageError, match="kvmemory: there is no such field: is kv_memory meant"):
        load_secondary(write(tmp_path, entry), None)
    del entry["kvmemory"]
    assert load_secondary(write(tmp_path, entry), None).port


def test_the_folder_of_nodes_files_as_the_first_readme_writes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mdi")
    (tmp_path / "settings_distr").mkdir()
    (tmp_path / "settings_distr" / "configuration.json").write_text(json.dumps(network()))
    given = tmp_path / "settings-distr" / "config.json"
    assert load_cluster(given).n_nodes == 3 and load_secondary(given, 1).name == "secondary1"
    assert len(load_nodes(given)) == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{given} is not there; reading {tmp_path / 'settings_distr' / 'configuration.json'}"
    ]
    with pytest.raises(UsageError, match="other.json"):
        load_cluster(tmp_path / "settings-distr" / "other.json")


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps(network()), encoding="utf-8-sig")
    assert load_cluster(path).n_nodes == 3


def without(*keys: str | int) -> dict[str, Any]:
    data = network()
    where: Any = data
    for key in keys[:-1]:
        where = where[key]
    del where[keys[-1]]
    return data


def with_value(value: object, *keys: str | int) -> dict[str, Any]:
    data = network()
    where: Any = data
    for key in keys[:-1]:
        where = where[key]
    where[keys[-1]] = value
    return data


S0 = ("nodes", "secondary", 0)
MISTAKES = [
    (without("nodes"), ("'nodes'",)),
    (without("nodes", "starter"), ("nodes: ", "'starter'")),
    (without(*S0, "addr"), ("nodes.secondary[0]: ", "'addr'")),
    (without(*S0, "communication"), ("secondary[0]: ", "'communication'")),
    (without(*S0, "communication", "port"), ("secondary[0].communication: ", "'port'")),
    (without(*S0, "inference", "port_in"), ("secondary[0].inference: ", "'port_in'")),
    (with_value(7, "nodes", "starter", "addr"), ("starter.addr: ", "string", "7")),
    (with_value("", "nodes", "starter", "addr"), ("starter.addr: ", "string", "''")),
    (with_value(None, "nodes", "starter", "addr"), ("starter.addr: ", "string", "null")),
    (with_value([], "nodes"), ("nodes: ", "object", "list")),
    (with_value({}, "nodes", "secondary"), ("secondary: ", "list", "object")),
    (with_value(None, "nodes", "secondary"), ("secondary: ", "list", "null")),
    (with_value("x", *S0), ("secondary[0]: ", "object", "'x'")),
    (with_value("8000", *S0, "communication", "port"), ("communication.port: ", "whole number", "'8000'")),
    (with_value(True, *S0, "communication", "port"), ("communication.port: ", "whole number", "True")),
    (with_value(1.5, *S0, "communication", "port"), ("communication.port: ", "whole number", "1.5")),
    (with_value(65536, *S0, "inference", "port_in"), ("port_in: ", "65535", "found 65536")),
    (with_value(-1, *S0, "inference", "port_out"), ("inference.port_out: ", "-1")),
    (with_value(0, *S0, "threads"), ("threads: ", "found 0")),
    (with_value(3, *S0, "device"), ("device: ", "string", "3")),
    (
        with_value(8000, *S0, "communication", "port"),
        ("127.0.0.1:8000", "starter's communication port", "secondary0's"),
    ),
    (with_value(8001, *S0, "inference", "port_in"), ("secondary0's communication port", "secondary0's port_in")),
    (with_value([entry(0)] * 1024, "nodes", "secondary"), ("secondary: ", "1023")),
]


@pytest.mark.parametrize(("data", "names"), MISTAKES, ids=["-".join(names) for _, names in MISTAKES])
def test_each_mistake_is_named(tmp_path: Path, data: dict[str, Any], names: tuple[str, ...]) -> None:
    path = write(tmp_path, data)
    with pytest.raises(UsageError) as caught:
        load_cluster(path)
    assert all(name in str(caught.value) for name in names)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "line 1, column 1"),
        ('{"nodes": {\n  "starter": }', "line 2, column 14"),
        ('{"nodes": [1, 2, ]}', "comma"),
        ("[1, 2]", "[1, 2]"),
        ("null", "null"),
        ('{"a": ' * 100_000, "nodes.json"),
        ('{"a": ' + "9" * 5000 + "}", "nodes.json"),
    ],
)
def test_what_is_no_json_is_refused(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(UsageError) as e:
        load_cluster(write(tmp_path, text))
    assert place in str(e.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_json(tmp_path / "no" / "such.json")
    assert "no/such.json" in str(caught.value)
    with pytest.raises(UsageError):
        read_json(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"addr": "\xe9"}')
    with pytest.raises(UsageError) as e:
        read_json(tmp_path / "latin.json")
    assert "latin.json" in str(e.value)


def test_nearest_existing(tmp_path: Path) -> None:
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
    assert nearest_existing(tmp_path) == tmp_path


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def spots(data: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a JSON structure."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [spot for key, value in items for spot in ((*here, key), *spots(value, (*here, key)))]


@pytest.mark.slow
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spot=st.sampled_from(spots(network())), value=JSON)
def test_any_value_anywhere_is_accepted_or_a_usage_error(tmp_path: Path, spot: tuple[Any, ...], value: Any) -> None:
    data = copy.deepcopy(network())
    where: Any = data
    for key in spot[:-1]:
        where = where[key]
    where[spot[-1]] = value
    path = write(tmp_path, data)
    try:
        assert isinstance(load_cluster(path), ClusterConfig)
    except UsageError as e:
        assert str(path) in str(e)


def test_the_nodes_files_that_are_shipped_can_be_read() -> None:
    folder = Path(__file__).resolve().parents[1] / "src" / "settings_distr"
    files = sorted(folder.glob("*.json"))
    assert files
    for path in files:
        if "nodes" in read_json(path):
            load_cluster(path)
        else:
            load_secondary(path, None)


@pytest.mark.parametrize(
    ("text", "cores"), [("0", (0,)), ("0,1", (0, 1)), ("3,0-2", (3, 0, 1, 2)), (" 1 , 1", (1,)), ("4-4", (4,))]
)
def test_core_numbers(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text, "--cores") == cores


@pytest.mark.parametrize("text", ["", "a", "0,", "-1", "2-1", "1.5", "0;1", "99999999"])
def test_what_are_no_core_numbers(text: str) -> None:
    with pytest.raises(UsageError) as e:
        parse_cores(text, "--cores")
    assert "--cores" in str(e.value) and e.value.code == "usage"


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("4096", 4096), ("2K", 2000), ("1.5k", 1500), ("500M", 500_000_000), ("2 GiB", 2 << 30), ("2gb", 2 * 10**9), ("0", 0),
        ("500mib", 500 << 20), ("7B", 7),
    ],
)  # fmt: skip
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_bytes(text, "--kv-memory") == n_bytes


@pytest.mark.parametrize("text", ["150.0 MB", "2.5 GB", "1.2 TB", "9.0 kB"])
def test_a_size_is_shown_as_it_was_typed(text: str) -> None:
    assert size(parse_bytes(text, "--memory")) == text


@pytest.mark.parametrize("text", ["", "G", "-1", "2X", "1e9", "two", "1" * 40])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError) as e:
        parse_bytes(text, "--kv-memory")
    assert "--kv-memory" in str(e.value) and e.value.code == "usage"


def test_a_node_may_have_cores_and_memory_of_its_own(tmp_path: Path) -> None:
    entry = {"addr": "h", "communication": {"port": 1}, "inference": {"port_in": 2}}
    path = tmp_path / "node.json"
    for cores, kv_memory in (([0, 2], "2M"), ("0,2", 2_000_000)):
        path.write_text(json.dumps({**entry, "cores": cores, "kv_memory": kv_memory}))
        node = load_secondary(path, None)
        assert (node.cores, node.kv_memory) == ((0, 2), 2_000_000)
    path.write_text(json.dumps(entry))
    assert (load_secondary(path, None).cores, load_secondary(path, None).kv_memory) == (None, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [("cores", []), ("cores", [-1]), ("cores", [True]), ("cores", 1), ("cores", "x"), ("kv_memory", True),
     ("kv_memory", 1.5), ("kv_memory", -1), ("kv_memory", "much")],
)  # fmt: skip
def test_cores_and_memory_that_cannot_be(tmp_path: Path, key: str, value: object) -> None:
    entry = {"addr": "h", "communication": {"port": 1}, "inference": {"port_in": 2}, key: value}
    path = tmp_path / "node.json"
    path.write_text(json.dumps(entry))
    with pytest.raises(UsageError) as e:
        load_secondary(path, None)
    assert f"node.json.{key}" in str(e.value) and e.value.code == "usage"
