"""The scenarios fit together, and one that fails in parts still tells the rest."""

import argparse
import sys
from pathlib import Path

import pytest

import compare
from mdi.checkpoint.chunks import ChunkFile
from peers.protocol import Case
from random_checkpoint import CONTEXT, DEEP_CONTEXT, config_of
from ring.quota import settings
from side_by_side import runner
from side_by_side.files import Chunks, Gguf, make_all
from side_by_side.memory import cache_bytes
from side_by_side.scenario import Check, Run, Scenario, SystemSpec
from side_by_side.scenarios import PER_SET, SCENARIOS
from side_by_side.setup import LLAMA_CACHE_OF, Setup
from side_by_side.tables import LLAMA, PROCESSORS
from side_by_side.workers import Worker, WorkerError


def setup(brevity=1):
    libraries = {instructions: Path("libraries") / instructions for instructions in PROCESSORS}
    return Setup("tiny-1m", Path("work"), (0, 1), brevity, libraries)


def built():
    yield from ((name, build(setup(brevity))) for name, build in SCENARIOS.items() for brevity in (1, 4))


@pytest.mark.parametrize("scenario", [pytest.param(s, id=name) for name, s in built()])
def test_scenarios_fit_together(scenario):
    systems = {spec.name: spec for spec in scenario.systems}
    labels = [run.label for run in scenario.runs]
    assert len(systems) == len(scenario.systems) and len(set(labels)) == len(labels)
    assert {run.system for run in scenario.runs} == set(systems)
    for check in scenario.checks:
        assert {check.above, *check.below} <= set(labels)
    for run in scenario.runs:
        context = DEEP_CONTEXT if scenario.name == "depth" else CONTEXT
        assert run.case.n_positions <= systems[run.system].options.get("max_length", context) <= context


def test_each_system_that_reads_a_file_says_that_it_needs_it():
    made = setup()
    scenario = SCENARIOS["sixteen"](made)
    folders = {need.starter.parent for need in made.needs if isinstance(need, Chunks)}
    files = {need.path for need in made.needs if isinstance(need, Gguf)}
    assert {Path(spec.options["chunks"]) for spec in scenario.systems if spec.kind == "ring"} == folders
    assert {Path(spec.options["gguf"]) for spec in scenario.systems if spec.kind == "llama.cpp"} == files
    assert len(folders) == len(files) == 3


def test_deep_texts_have_a_checkpoint_that_holds_them():
    made = setup()
    SCENARIOS["depth"](made)
    assert {config_of(need.shape).block_size for need in made.needs} == {DEEP_CONTEXT}
    assert config_of(made.shape).block_size == CONTEXT


@pytest.mark.parametrize("name", PER_SET)
def test_each_instruction_set_is_forced_on_both_sides(name):
    scenario = PER_SET[name](setup())
    wanted = {fmt: set(PROCESSORS) for fmt in LLAMA}
    for kind, variable in (("ring", "MDI_KERNELS"), ("llama.cpp", "LLAMA_CPP_LIB_PATH")):
        found = {}
        for spec in scenario.systems:
            if spec.kind == kind:
                assert Path(spec.environment[variable]).name == spec.instructions
                found.setdefault(spec.group, set()).add(spec.instructions)
        assert found == wanted
    assert len(scenario.checks) == 9 and scenario.repeats == 3


@pytest.mark.parametrize("scenario", [pytest.param(s, id=name) for name, s in built()])
def test_caches_beside_llama_cpp_have_one_type(scenario):
    of_llama = {spec.options["cache"] for spec in scenario.systems if spec.kind == "llama.cpp"}
    of_ring = {compare.settings(scenario)[spec.name]["cache"] for spec in scenario.systems if spec.kind == "ring"}
    assert not of_llama or {LLAMA_CACHE_OF[cache] for cache in of_ring} == of_llama


def test_a_library_is_given_for_each_instruction_set():
    found = compare.folders("avx2=a,avx512=/b/c")
    assert found == {"avx2": Path("a").resolve(), "avx512": Path("/b/c").resolve()}
    for text in ("avx3=a", "avx2", "avx2="):
        with pytest.raises(argparse.ArgumentTypeError, match="SET=FOLDER"):
            compare.folders(text)


def test_what_a_cut_allows_is_all_work_over_that_of_the_busiest_node():
    of_tiny_llama = Setup("tiny-llama-1.1b", Path("work"), (0, 1))
    # 22 blocks, and a head that is as much work as 1.487 of them; three blocks on the busiest of eight nodes
    assert of_tiny_llama.cut_allows(8) == pytest.approx(7.83, abs=0.005)
    assert of_tiny_llama.cut_allows(1) == 1.0


def test_files_are_made_once_in_every_form(tmp_path):
    packed = Chunks(tmp_path / "tiny-3m", "tiny-3m", "int4", 2)  # a shape without plain weights
    by_hand = Chunks(tmp_path / "tiny-1m", "tiny-1m", "int8", 2, (0, 3))
    bad = Chunks(tmp_path / "tiny-1m", "tiny-1m", "int8", 9)
    assert make_all({packed: None, by_hand: None, bad: None}, "") == 1
    times = {}
    for chunks, n_layer in ((packed, 4), (by_hand, 3)):
        found = [ChunkFile(chunks.of(node)) for node in ("starter", "secondary0")]
        assert found[0].manifest.blocks[0] == 0 and found[1].manifest.blocks[1] == n_layer
        assert all(one.manifest.format == chunks.form for one in found)
        times[chunks] = chunks.starter.stat().st_mtime_ns
    assert ChunkFile(by_hand.of("secondary0")).manifest.blocks == (0, 3)
    assert make_all({packed: None, by_hand: None}, "") == 0
    assert all(chunks.starter.stat().st_mtime_ns == time for chunks, time in times.items())


def test_prompts_of_a_case_begin_differently():
    case = Case(32, 5, 1)
    assert len({case.prompt(i)[0] for i in range(32)}) == 32
    assert all(len(case.prompt(i)) == 5 and min(case.prompt(i)) > 0 for i in range(32))


class FakeWorker:
    """A system of so many tokens per second; "broken" does not load, "weak" fails at its second case."""

    log: list[str] = []

    def __init__(self, name, python, module, options, cores, log_folder, environment):
        self.log.append(f"load {name}")
        self.name, self.rate, self.n_cases = name, options.get("rate", 1.0), 0

    def wait_ready(self, timeout_s):
        if self.name == "broken":
            raise WorkerError("broken: no such thing")

    def run(self, case, timeout_s):
        self.n_cases += 1
        self.log.append(self.name)
        if self.name == "weak" and self.n_cases > 1:
            raise WorkerError("weak: out of breath")
        return {"times_s": [[(i + 1) / self.rate for i in range(case["n_new"])]] * case["n_sequences"]}

    def end(self):
        self.log.append(f"end {self.name}")
        return {"peak_rss_bytes": 1}

    def kill(self):
        pass


def cases():
    return [line for line in FakeWorker.log if " " not in line]


@pytest.fixture
def outcome_of(monkeypatch):
    monkeypatch.setattr(runner, "Worker", FakeWorker)
    FakeWorker.log = []

    def run(rates, checks=(), repeats=3, budget_s=60.0, groups=None):
        specs = tuple(
            SystemSpec(name, "ring", {"rate": rate}, (0,), group=(groups or {}).get(name, ""))
            for name, rate in rates.items()
        )
        runs = tuple(Run(name, name, Case(2, 4, 8)) for name in rates)
        scenario = Scenario("s", "a scenario", specs, runs, checks)
        return scenario, runner.run_scenario(scenario, {"": "python"}, Path("logs"), repeats, budget_s)

    return run


def test_cases_take_turns_there_and_back_after_a_warm_up(outcome_of):
    scenario, outcome = outcome_of({"a": 10.0, "b": 5.0}, (Check("a against b", "a", ("b",)),))
    assert cases() == ["a", "b", "a", "b", "b", "a", "a", "b"]
    (result,) = scenario.results(outcome)
    assert result.measured.n == 3
    assert result.measured.median == pytest.approx(2.0)


def test_groups_are_loaded_one_after_the_other(outcome_of):
    scenario, outcome = outcome_of(
        {"a": 10.0, "b": 5.0, "c": 5.0}, (Check("a against c", "a", ("c",)),), 1, groups={"b": "later"}
    )
    assert FakeWorker.log == [
        "load a", "load c", "a", "c", "a", "c", "end a", "end c", "load b", "b", "b", "end b",
    ]  # fmt: skip
    assert set(outcome.rounds) == set(outcome.ends) == {"a", "b", "c"}
    assert scenario.results(outcome)[0].measured.median == pytest.approx(2.0)


def test_without_time_there_is_one_round(outcome_of):
    _, outcome = outcome_of({"a": 1.0}, budget_s=-1.0)
    assert len(outcome.rounds["a"]) == 1


@pytest.mark.parametrize("name, error", [("broken", "no such thing"), ("weak", "out of breath")])
def test_a_system_that_fails_leaves_the_others_alone(outcome_of, name, error):
    checks = (Check("a against b", "a", ("b",)), Check("against it", "a", (name,)))
    scenario, outcome = outcome_of({"a": 10.0, name: 1.0, "b": 5.0}, checks)
    good, bad = scenario.results(outcome)
    assert good.measured.n == 3
    assert bad.measured is None and error in bad.error


def test_a_worker_answers_and_its_failures_are_told(tmp_path, monkeypatch):
    (tmp_path / "fake_system.py").write_text(
        "import os\nfrom peers.protocol import serve\n"
        "class Fake:\n"
        "    def run(self, case):\n"
        "        print(os.environ['WORD'])\n"
        "        if case.n_new > 9: raise ValueError('too many')\n"
        "        return {'times_s': [[0.1] * case.n_new]}\n"
        "    def end(self): return {'bye': True}\n"
        "serve(lambda options: Fake())\n"
    )
    monkeypatch.chdir(tmp_path)
    worker = Worker("fake", sys.executable, "fake_system", {}, [0, 1], tmp_path / "logs", {"WORD": "not an answer"})
    worker.wait_ready(60)
    assert worker.run(Case(1, 1, 2).to_json(), 60) == {"times_s": [[0.1, 0.1]]}
    end = worker.end()
    assert end["bye"] is True and end["peak_rss_bytes"] >= 0
    assert (tmp_path / "logs" / "fake.log").read_text() == "not an answer\n"

    worker = Worker("fake", sys.executable, "fake_system", {}, [0, 1], tmp_path / "logs", {"WORD": "not an answer"})
    worker.wait_ready(60)
    with pytest.raises(WorkerError, match="fake: ValueError: too many"):
        worker.run(Case(1, 1, 10).to_json(), 60)
    worker.kill()


def test_a_quota_is_written_as_the_kernel_wants_it():
    assert settings(0.2, is_v2=True)[1:] == [("cpu.max", "2000 10000")]
    assert settings(0.2, is_v2=False)[1:] == [("cpu.cfs_period_us", "10000"), ("cpu.cfs_quota_us", "2000")]
    assert settings(0.001, is_v2=True)[1:] == [("cpu.max", "1000 10000")]


def test_caches_of_a_secondary():
    # 2 sequences of 7 computed positions, 3 blocks, keys and values of 2 groups of 16 numbers in 4 bytes
    assert cache_bytes("tiny-1m", 3, Case(2, 4, 4)) == 2 * 7 * 3 * 2 * 2 * 16 * 4
