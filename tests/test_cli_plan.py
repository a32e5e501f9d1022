"""`mdi plan`, from flags to output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import close_session

from families import config_of
from gguf_files import byte_level_tokens, write_gguf
from hub_server import HubModel, HubServer
from mdi.cli import launch
from mdi.engine.speculation import most_frames, tokens_per_s
from mdi.errors import UsageError
from mdi.placement.profile import boards
from missing_libraries import without
from tiny_checkpoint import tiny_config, tiny_gpt, tokenizer, write_checkpoint
from tiny_models import tiny_hf

SRC = Path(__file__).parents[1] / "src"


@pytest.fixture
def profiles(tmp_path: Path) -> str:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(boards().to_json()))
    return str(path)


def test_the_example_is_a_profile_that_works(capsys: pytest.CaptureFixture[str], profiles: str) -> None:
    assert launch("plan", ["--example"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path(profiles).read_text())
    assert launch("plan", ["--profiles", profiles, "--config", "tiny-llama-1.1b", "--n-samples", "32"]) == 0
    out = capsys.readouterr().out
    assert "starter" in out and "tokens/s" in out and "guessed" in out


@pytest.mark.parametrize(("flags", "tokens_s"), [([], 101), (["--nodes", "starter"], 35)])
def test_plans_that_documents_show(
    capsys: pytest.CaptureFixture[str], profiles: str, flags: list[str], tokens_s: int
) -> None:
    """docs/usage.md; the others have commands that make them."""
    asked = ["TinyLlama/TinyLlama-1.1B-Chat-v1.0", "--n-samples", "24", "--sequence-length", "512", "--json"]
    assert launch("plan", ["--profiles", profiles, *asked, *flags]) == 0
    assert round(json.loads(capsys.readouterr().out)["tokens_per_s"]) == tokens_s


def test_plans_of_documents_need_neither_litgpt_nor_torch(profiles: str, tmp_path: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (SRC.parent / "docs").glob("*.md")]
    shown = [
        line for text in texts for line in re.findall(r"^mdi plan (.*--profiles cluster\.json.*)$", text, re.MULTILINE)
    ]
    assert len(shown) > 3
    code = without(("torch", "litgpt", "lightning", "transformers", "safetensors")) + (
        "import shlex\nfrom mdi.cli import launch\n"
        "for line in sys.argv[1:]:\n    assert launch('plan', shlex.split(line)) == 0\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC), "MDI_STORE": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", code, *shown]
    done = subprocess.run(words, cwd=Path(profiles).parent, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TinyLlama-1.1B-Chat-v1.0 in ") == sum(
        "TinyLlama" in line and "--json" not in line for line in shown
    )


def test_the_first_token_of_a_prompt_and_windows(capsys: pytest.CaptureFixture[str], profiles: str) -> None:
    flags = ["--profiles", profiles, "--config", "tiny-llama-1.1b", "--quantize", "int8", "--json"]
    found = []
    for more in ([], ["--prompt-tokens", "64"], ["--memory", "700MB"]):
        assert launch("plan", [*flags, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    usual, short, windowed = (one["first_token"] for one in found)
    assert (usual["n_tokens"], short["n_tokens"]) == (512, 64)
    assert short["seconds"] < usual["seconds"] < windowed["seconds"]
    assert [node["read_bytes"] > 0 for node in found[2]["nodes"]] == [True] * 3
    assert found[2]["advice"] == [], "which would compare with nodes without windows"
    assert launch("plan", [*flags, "--sequence-length", "100", "--prompt-tokens", "101"]) != 0
    assert "a sequence has 100 tokens at most" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("disk", "said"),
    [(80e6, "read, which is faster"), (1e3, "computed, which is faster"), (0.0, "nobody knows how fast the disks are")],
)
def test_a_prompt_that_was_kept(disk: float, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    known = boards().to_json()
    for node in known["nodes"]:
        node["disk_read_bytes_s"] = disk
    (path := tmp_path / "cluster.json").write_text(json.dumps(known))
    flags = ["--profiles", str(path), "--config", "tiny-llama-1.1b", "--quantize", "int8", "--kv-dtype", "fp16"]
    flags += ["--n-samples", "4"]  # which all nodes are used for
    assert launch("plan", flags) == 0 and "prefixes:" not in capsys.readouterr().out
    assert launch("plan", [*flags, "--keep-prefixes", "1G"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("prefixes:")]
    assert said in line
    assert launch("plan", [*flags, "--keep-prefixes", "1G", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, a_block = found["first_token"], 512 * 2 * 4 * 64 * 2  # bytes: keys and values of 4 groups
    assert first["kept_bytes"] == 22 * a_block
    most = max(stop - start for start, stop in (node["blocks"] for node in found["nodes"]))
    assert most < 22 and first["read_s"] == (pytest.approx(most * a_block / disk) if disk else None), "all read at once"
    for node in known["nodes"]:
        node["machine"] = "one"
    path.write_text(json.dumps(known))
    assert launch("plan", [*flags, "--keep-prefixes", "1G", "--json"]) == 0
    read_s = json.loads(capsys.readouterr().out)["first_token"]["read_s"]
    assert read_s == (pytest.approx(22 * a_block / disk) if disk else None), "from one disk"


def test_clients(capsys: pytest.CaptureFixture[str], profiles: str) -> None:
    flags = ["--profiles", profiles, "--config", "tiny-llama-1.1b", "--quantize", "int8"]
    assert launch("plan", [*flags, "--aim", "clients", "--per-client", "2048:2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    n = found["clients"]["n"]
    assert n == found["n_sequences"] > 3 and found["sequence_length"] == 2048
    assert found["tokens_per_s"] >= 2 * n and found["clients"]["limit"] == "speed"
    assert launch("plan", [*flags, "--aim", "clients", "--per-client", "2048:2"]) == 0
    assert f"clients:  {n} texts of up to 2048 tokens have 2 tokens/s each or more" in capsys.readouterr().out
    for wrong, message in (
        (["--aim", "clients"], "go together"),
        (["--aim", "clients", "--per-client", "4096"], "expected the tokens of a text"),
        (["--aim", "clients", "--per-client", "64:1", "--memory", "1G"], "leave --memory out"),
        (["--aim", "clients", "--per-client", "99999:1"], "--per-client 99999"),
        (
            ["--aim", "clients", "--per-client", "64:1", "--n-samples", "4"],
            "leave --sequence-length and --n-samples out",
        ),
        (["--memory", "1G", "--placement", "latency"], "leave --placement latency out"),
    ):
        assert launch("plan", [*flags, *wrong]) != 0
        assert message in " ".join(capsys.readouterr().err.split())


def test_json(capsys: pytest.CaptureFixture[str], profiles: str) -> None:
    flags = ["--profiles", profiles, "--config", "pythia-160m", "--placement", "even", "--sequence-length", "100"]
    assert launch("plan", [*flags, "--quantize", "fp16", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["format"] == "fp16" and data["sequence_length"] == 100 and data["placement"] == "even"
    assert sum(b - a for a, b in (n["blocks"] for n in data["nodes"])) == 12


def test_a_hub_name_and_some_of_the_nodes(capsys: pytest.CaptureFixture[str], profiles: str) -> None:
    flags = ["--profiles", profiles, "--config", "EleutherAI/pythia-14m", "--nodes", "secondary1", "starter", "--json"]
    assert launch("plan", [*flags, "--layers", "2,4"]) == 0
    assert [n["name"] for n in json.loads(capsys.readouterr().out)["nodes"]] == ["secondary1", "starter"]


def test_models_that_litgpt_lacks_by_their_names_on_the_hub(
    capsys: pytest.CaptureFixture[str], profiles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where litgpt is not installed, and as the model whose times a profile has."""
    monkeypatch.setitem(sys.modules, "litgpt.config", None)
    flags = ["--profiles", profiles, "--json", "--sequence-length", "512"]
    assert launch("plan", [*flags, "--config", "openai-community/gpt2-xl", "--dtype", "float32"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert sum(b - a for a, b in (n["blocks"] for n in plan["nodes"])) == 48
    profile = json.loads(Path(profiles).read_text())
    Path(profiles).write_text(json.dumps(profile | {"model": "gpt2-medium"}))
    assert launch("plan", [*flags, "--quantize", "int8"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"] == "gpt2-medium" and sum(b - a for a, b in (n["blocks"] for n in plan["nodes"])) == 24


def test_a_checkpoint_and_its_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], profiles: str) -> None:
    from dataclasses import asdict

    (tmp_path / "model_config.yaml").write_text(yaml.safe_dump(asdict(config_of("Llama-3.1-8B"))))
    for flags in (
        ["--ckpt", str(tmp_path)],
        ["--config", str(tmp_path)],
        ["--config", str(tmp_path / "model_config.yaml")],
    ):
        assert launch("plan", ["--profiles", profiles, *flags, "--dtype", "float32"]) == 0
        assert "in float32" in capsys.readouterr().out


@pytest.mark.parametrize(("method", "flag"), [("throughput", "--placement throughput"), ("even", "--layers 1,2,2")])
def test_chunks_that_win_over_the_plan_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profiles: str, method: str, flag: str
) -> None:
    ckpt = write_checkpoint(tmp_path / "tiny")
    flags = ["--profiles", profiles, "--ckpt", str(ckpt), "--placement", method, "--dtype", "float32"]
    assert launch("plan", flags) == 0
    assert "chunks" not in capsys.readouterr().out
    assert launch("prepare-model", [str(ckpt), "--layers", "3,1,1"]) == 0
    capsys.readouterr()
    assert launch("plan", flags) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "chunks" in line]
    assert "starter 0-2, secondary0 3, secondary1 4" in told and told.endswith(flag)
    assert launch("plan", [*flags, "--layers", "1,2,2"]) == 0
    assert "chunks" not in capsys.readouterr().out


def test_what_does_not_fit_ends_with_what_is_missing(capsys: pytest.CaptureFixture[str], profiles: str) -> None:
    flags = ["--profiles", profiles, "--config", "Llama-2-13b-hf", "--sequence-length", "512"]
    assert launch("plan", flags) == 1
    assert "of that do not fit" in capsys.readouterr().err
    assert launch("plan", [*flags, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["missing"][0]["bytes"] > 5 * 10**8 and "does not fit" in data["error"]


def test_the_starter_is_measured_as_its_nodes_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr("mdi.host.threads.choose_threads", lambda *args: used.append(args))
    monkeypatch.setattr(
        "mdi.placement.planning.measure_live", lambda cluster, *args: used.append(cluster.starter.device)
    )

    def enough(*args: Any) -> Any:
        raise UsageError("enough")

    monkeypatch.setattr("mdi.cli.plan.plan_on", enough)
    path = tmp_path / "nodes.json"
    entry = {"addr": "127.0.0.1", "communication": {"port": 1}, "inference": {"port_in": 2}}
    path.write_text(json.dumps({"nodes": {"starter": {**entry, "threads": 2, "cores": "0,3", "device": "cpu"}}}))
    assert launch("plan", ["--nodes-config", str(path), "--config", "pythia-14m"]) == 2
    assert used == [(2, (0, 3), []), "cpu"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "give the model"),
        (["pythia-14m", "--config", "pythia-14m"], "give one of them"),
        (["pythia-14m", "--profiles", "{}", "--nodes-config", "x.json"], "give one of them"),
        (["--profiles", "nowhere.json"], "cannot read nowhere.json"),
        (["--profiles", "{}"], "give the model"),
        (["--profiles", "{}", "--config", "pythia-14"], "did you mean pythia-14m"),
        (["--profiles", "{}", "--config", "gpt-oss"], "did you mean openai/gpt-oss-20b, openai/gpt-oss-120b?"),
        (["--profiles", "{}", "--config", "gtp2-xl"], "did you mean openai-community/gpt2-xl"),
        (["--profiles", "{}", "--config", "zai-org/GLM-4.5-Aire"], "did you mean zai-org/GLM-4.5-Air,"),
        (["--profiles", "{}", "--config", "pythia-14m", "--sequence-length", "9999"], "has a context of 512"),
        (["--profiles", "{}", "--config", "pythia-14m", "--n-samples", "0"], "at least one sequence"),
        (["--profiles", "{}", "--config", "pythia-14m", "--quantize", "int3"], "unknown weight format 'int3'"),
        (["--profiles", "{}", "--config", "pythia-14m", "--nodes", "x"], "no node 'x'"),
        (["--profiles", "{}", "--config", "pythia-14m", "--nodes", "starter", "starter"], "each node once"),
    ],
)
def test_what_cannot_be_planned(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str], profiles: str
) -> None:
    assert launch("plan", [flag.replace("{}", profiles) for flag in flags]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_whatever_runs_is_planned_without_litgpt(tmp_path: Path, profiles: str) -> None:
    """By the same names: a GGUF file, the embedded model, a folder in Hugging Face's form; without torch, too."""
    tokens = byte_level_tokens(json.loads(tokenizer().to_str()))
    file = tmp_path / "My-Model.Q8.gguf"
    write_gguf(file, "Llama-3.1-8B", tiny_config(), tiny_gpt().state_dict(), tokens=tokens)
    code = without(("torch", "litgpt", "lightning", "transformers", "safetensors")) + (
        "import os\nfrom mdi.cli import launch\n"
        "for name in sys.argv[3:]:\n    assert launch('plan', [name, '--profiles', sys.argv[2], '--store', sys.argv[1]]) == 0\n"
        "assert launch('plan', ['Qwen2.5-7B', '--profiles', sys.argv[2]]) == 2\n"
    )
    folder, _ = tiny_hf(tmp_path / "in-hf")
    words = [str(tmp_path / "store"), profiles, str(file), "nano-llama", str(folder), "gpt2-xl"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=SRC, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("My-Model.Q8 in "), "as the file is called"
    assert done.stderr.count("error: ") == 1 and "pip install litgpt" in done.stderr


def test_of_a_model_on_the_hub_only_its_settings_are_fetched(
    tmp_path: Path, profiles: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = tiny_hf(tmp_path / "hf")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setenv("MDI_CACHE_DIR", str(tmp_path / "cache"))
    flags = ["--profiles", profiles, "--store", str(tmp_path / "store"), "--json"]
    with HubServer({"org/tiny": HubModel(files), "org/GGUF": HubModel({"a-Q4_0.gguf": b"x"})}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        assert launch("plan", ["org/tiny", *flags]) == 0
        assert [path.rpartition("/")[2] for _, path, _ in hub.requests if "/resolve/" in path][:1] == ["config.json"]
        assert not [path for _, path, _ in hub.requests if "safetensors" in path]
        assert launch("plan", ["org/GGUF", *flags]) == 1
    close_session()
    printed = capsys.readouterr()
    assert json.loads(printed.out)["nodes"] and "mdi pull org/GGUF" in printed.err
    assert not (tmp_path / "store" / "org").exists()


def test_without_nodes_it_is_for_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("plan", [str(write_checkpoint(tmp_path / "tiny")), "--json"]) == 0
    printed = capsys.readouterr()
    assert [node["name"] for node in json.loads(printed.out)["nodes"]] == ["starter"]
    assert "this machine alone" in printed.err


def test_the_example_is_a_case_where_the_ring_wins(capsys: pytest.CaptureFixture[str], profiles: str) -> None:
    """The commands of docs/distributing.md and README: three boards have three times the rate of one."""
    flags = [
        "--profiles",
        profiles,
        "--config",
        "tiny-llama-1.1b",
        "--sequence-length",
        "512",
        "--n-samples",
        "24",
        "--json",
    ]
    assert launch("plan", flags) == 0
    ring = json.loads(capsys.readouterr().out)
    assert launch("plan", [*flags, "--nodes", "starter"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert len(ring["nodes"]) == 3 and not ring["left_out"]
    assert ring["tokens_per_s"] > 2.5 * alone["tokens_per_s"]


def test_one_sequence_goes_round_no_more_nodes_than_it_must(capsys: pytest.CaptureFixture[str], profiles: str) -> None:
    assert launch("plan", ["--profiles", profiles, "--config", "tiny-llama-1.1b"]) == 0
    told = capsys.readouterr().out
    assert "--placement even uses all nodes" in told
    assert launch("plan", ["--profiles", profiles, "--config", "tiny-llama-1.1b", "--placement", "even"]) == 0
    assert "--placement even" not in capsys.readouterr().out


def test_a_rate_of_right_guesses_predicts_the_speed_of_one_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    assert launch("plan", ["--example"]) == 0
    (tmp_path / "boards.json").write_text(capsys.readouterr().out, encoding="utf-8")
    flags = ["--profiles", str(tmp_path / "boards.json"), "--config", "tiny-llama-1.1b", "--quantize", "int8", "--json"]
    found = {}
    for rate in ("0", "0.8"):
        assert launch("plan", [*flags, "--placement", "even", "--draft-rate", rate]) == 0
        found[rate] = json.loads(capsys.readouterr().out)
    plain = found["0"]["tokens_per_s_one_sequence"]
    assert found["0"]["draft"]["tokens_s"] == pytest.approx(plain)
    told, stages = found["0.8"]["draft"], [node["stage_s"] for node in found["0.8"]["nodes"]]
    assert told["n_frames"] > 1 and told["tokens_s"] > 1.5 * plain
    speeds = []
    for more in range(4):  # rows, at a tenth of the time of one each; links take as long
        round_s, stage_s = 1 / plain + 0.1 * more * sum(stages), (1 + 0.1 * more) * max(stages)
        speeds.append(tokens_per_s(0.8, 1 + more, most_frames(round_s, stage_s), round_s, stage_s))
    assert told["tokens_s"] == pytest.approx(max(speeds)) and told["tokens_s"] > 1.05 * speeds[0]
    assert told["n_rows"] == 1 + speeds.index(max(speeds)) > 1
    assert found["0"]["draft"]["n_rows"] == 1
    assert told["beats_tensor"] is None or 0 < told["beats_tensor"] < 1


def test_one_node_computes_several_rows_of_a_text_but_of_experts(
    tmp_path: Path, profiles: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each further row reads other experts."""
    dense = write_checkpoint(tmp_path / "dense")
    mixture = write_checkpoint(
        tmp_path / "mixture", mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2, moe_intermediate_size=24
    )
    alone = json.loads(Path(profiles).read_text())
    alone["nodes"] = alone["nodes"][:1]
    alone["links"] = []
    (tmp_path / "alone.json").write_text(json.dumps(alone))
    for folder, n_rows in ((dense, 4), (mixture, 1)):
        flags = ["--profiles", str(tmp_path / "alone.json"), "--ckpt", str(folder), "--draft-rate", "0.8", "--json"]
        assert launch("plan", flags) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["draft"]["n_frames"], found["draft"]["n_rows"]) == (1, n_rows)
        faster = found["draft"]["tokens_s"] / found["tokens_per_s_one_sequence"]
        assert 2.2 < faster < 2.96 if n_rows > 1 else faster == pytest.approx(1)


def test_a_small_model_takes_memory_and_time_of_the_starter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("plan", ["--example"]) == 0
    (tmp_path / "boards.json").write_text(capsys.readouterr().out, encoding="utf-8")
    flags = ["--profiles", str(tmp_path / "boards.json"), "--config", "tiny-llama-1.1b", "--quantize", "int8", "--json"]
    found = {}
    for draft in ("none", "pythia-160m"):
        assert launch("plan", [*flags, "--layers", "6,8,8", "--draft", draft]) == 0
        found[draft] = json.loads(capsys.readouterr().out)["nodes"]
    plain, guessed = found["none"], found["pythia-160m"]
    more = guessed[0]["bytes"]["weights"] - plain[0]["bytes"]["weights"]
    assert 100e6 < more < 200e6 and guessed[0]["stage_s"] > 1.1 * plain[0]["stage_s"]
    assert guessed[1:] == plain[1:]
    blocks = {}
    for draft in ("none", "pythia-1.4b"):
        assert launch("plan", [*flags, "--placement", "throughput", "--n-samples", "24", "--draft", draft]) == 0
        nodes = json.loads(capsys.readouterr().out)["nodes"]
        blocks[draft] = nodes[0]["blocks"][1] - nodes[0]["blocks"][0]
    assert blocks["pythia-1.4b"] < blocks["none"]
    assert launch("plan", [*flags, "--draft", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err
