"""Units and containers name commands, flags and nodes that there are; they cannot be run here."""

from __future__ import annotations

import argparse
import configparser
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from mdi.cli import COMMANDS, parser_of
from mdi.spec.cluster import load_cluster

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))


def parse(command_line: list[str]) -> argparse.Namespace:
    """As `mdi` would; SystemExit for a flag that there is not."""
    command, *flags = command_line
    module: Any = importlib.import_module(COMMANDS[command][0])
    return parser_of(module).parse_args(flags)


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_a_command_that_there_is(path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE))
    program, *command = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/mdi")
    assert parse(command)
    assert int(unit["Service"]["TimeoutStopSec"]) > 25, "it may take as long as it needs to end in good order"
    assert unit["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.parametrize("name", ["starter", "secondary0", "secondary1"])
def test_a_container_starts_a_command_that_there_is(name: str) -> None:
    assert parse(shlex.split(services()[name]["command"]))


def test_the_containers_are_the_nodes_of_the_file() -> None:
    cluster = load_cluster(DEPLOY / "nodes.json")
    assert [node.addr for node in cluster.nodes] == list(services())
    assert all(node.listen_addr == "0.0.0.0" for node in cluster.nodes)
    for i in (0, 1):
        assert parse(shlex.split(services()[f"secondary{i}"]["command"])).nodes_config[1] == str(i)


def test_the_pods_start_a_command_that_there_is() -> None:
    parts = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    pods = next(part for part in parts if part["kind"] == "StatefulSet")
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    assert parse(parse(container["args"]).job)
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(variables["MDI_SIZE"]) == pods["spec"]["replicas"]
    assert variables["MDI_HEAD"] == f"{pods['metadata']['name']}-0.{pods['spec']['serviceName']}"
    assert pods["spec"]["serviceName"] in {part["metadata"]["name"] for part in parts if part["kind"] == "Service"}


def test_flags_of_rays_actors_are_those_of_a_job() -> None:
    text = (DEPLOY / "ray_ring.py").read_text()
    run = text[text.index("    def run(") : text.index("def main")]
    flags = set(re.findall(r'"(--[a-z-]+)"', run))
    known = {
        action
        for option in parser_of(importlib.import_module(COMMANDS["job"][0]))._actions
        for action in option.option_strings
    }
    assert flags and flags <= known


def test_the_api_is_not_open_to_other_machines() -> None:
    assert services()["starter"]["ports"] == ["127.0.0.1:8000:8000"]


def test_the_image_takes_what_there_is() -> None:
    """Every file that is copied exists."""
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert copied and all((DEPLOY.parent / name).exists() for name in copied)
