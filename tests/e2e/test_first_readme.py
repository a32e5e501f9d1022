"""The commands of the first version's README, word for word, in a clone whose models are in the user's store."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hub_server import HubModel, HubServer
from mdi.run.local import free_ports
from processes import SRC, Process, Spawn
from tiny_checkpoint import write_checkpoint

MODEL = "meta-llama/Meta-Llama-3-8B-Instruct"
THREE_NODES = (
    './src/prepare_model.py meta-llama/Meta-Llama-3-8B-Instruct --n-nodes 3 --hf-token "<your huggingface token>"',
    "./src/starter.py --ckpt ./src/checkpoints/meta-llama/Meta-Llama-3-8B-Instruct -v --nodes-config "
    './src/settings-distr/config.json --n-samples 3 --n-tokens 500 --prompt "Who are you?" --block-size 500',
    "./src/secondary.py -v --nodes-config ./src/settings-distr/config.json 0",
    "./src/secondary.py -v --nodes-config ./src/settings-distr/config.json 1",
)
TWO_GPUS = (
    './src/prepare_model.py meta-llama/Meta-Llama-3-8B-Instruct --n-nodes 2 --hf-token "<your huggingface token>"',
    "./src/starter.py --ckpt ./src/checkpoints/meta-llama/Meta-Llama-3-8B-Instruct -v --nodes-config "
    "./src/settings-distr/config_2gpus.json --n-samples 2 --n-tokens 500 --prompt "
    '"What is the recipe for pizza?" --block-size 500',
    "./src/llama2/secondary.py -v --chunk ./src/llama/checkpoints/meta-llama/Meta-Llama-3-8B-Instruct/chunks/2nodes/"
    "model_secondary0.pth --nodes-config src/settings_distr/config_2gpus.json 0",
)
Typed = Callable[[str], Process]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = write_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", with_end=False)
    with HubServer({MODEL: HubModel({path.name: path.read_bytes() for path in folder.iterdir()})}) as server:
        yield server


@pytest.fixture
def typed(hub: HubServer, spawn: Spawn, tmp_path: Path) -> Typed:
    """Starts what is typed in a clone. Its nodes files have free ports, and no GPUs."""
    src = tmp_path / "clone" / "src"
    src.mkdir(parents=True)
    for path in SRC.glob("*.py"):
        shutil.copy(path, src)
    for package in ("mdi", "mdi_tools", "mdi_training"):
        (src / package).symlink_to(SRC / package)
    shutil.copytree(SRC / "settings_distr", src / "settings_distr")
    ports = iter(free_ports(100))
    for path in src.glob("settings_distr/*.json"):
        text = re.sub(r'("port(?:_in|_out)?": )\d+', lambda found: found[1] + str(next(ports)), path.read_text())
        path.write_text(text.replace('"device": "cuda:', '"device": "cpu", "was": "cuda:'))
    # No version had this folder; and the interpreter is that of the tests.
    (src / "llama2").mkdir()
    shutil.copy(src / "secondary.py", src / "llama2")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {"HF_ENDPOINT": hub.endpoint, "MDI_STORE": str(tmp_path / "store"), "PATH": path}

    def start(command: str) -> Process:
        words = shlex.split(command)
        # Launchers find the package beside them.
        own = {"PYTHONPATH": "" if Path(words[0]).parent == Path("src") else str(src)}
        return spawn(Path(words[0]).stem, *words[1:], command=words[:1], env=env | own, cwd=src.parent)

    return start


def test_llama_over_three_devices(typed: Typed) -> None:
    prepare, *nodes = THREE_NODES
    prepared = typed(prepare)
    assert prepared.wait() == 0, prepared.story()
    starter, *secondaries = map(typed, nodes)
    assert starter.wait() == 0, starter.story()
    assert "configuration.json" in starter.err and f"taking {MODEL}, which is in" in starter.err
    assert starter.err.count("settings-distr/config.json is not there") == 1
    for secondary in secondaries:
        assert secondary.err.count("settings-distr/config.json is not there") == 1


@pytest.mark.slow
def test_llama_on_two_devices_of_one_system_with_a_chunk(typed: Typed) -> None:
    prepare, *nodes = TWO_GPUS
    prepared = typed(prepare)
    assert prepared.wait() == 0, prepared.story()
    starter, secondary = map(typed, nodes)
    assert starter.wait() == 0, starter.story()
    assert f"taking that of {MODEL}" in secondary.err


def test_a_name_that_the_store_lacks_is_still_a_mistake(typed: Typed) -> None:
    process = typed("./src/starter.py --ckpt ./src/checkpoints/meta-llama/Other")
    assert process.wait() == 2 and "meta-llama/Other" in process.err


def test_the_nodes_files_are_as_the_readme_shows_them() -> None:
    shown = json.loads((SRC / "settings_distr" / "config_2gpus.json").read_text())["nodes"]
    assert (shown["starter"]["device"], shown["secondary"][0]["device"]) == ("cuda:0", "cuda:1")
