"""Fine-tuning over a ring: the same outputs of blocks and losses on any nodes; texts with what was learned."""

from __future__ import annotations

import json
import os
import signal
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.nn import functional

from adapter_files import write_adapter
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.source import LitCheckpoint
from mdi.cli import launch
from mdi.control.messages import InitRequest, PartSpec
from mdi.engine.sequence import SamplingParams, wait_for_event
from mdi.errors import CheckpointError, ControlError, MdiError, UsageError
from mdi.kernels import library
from mdi.kernels.slices import Slice, adapter_of
from mdi.model.plain import ModelConfig, spec_of
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.extent import Extent
from mdi.spec.model_id import ModelId
from mdi.spec.options import SIDE_FILE, StarterOptions
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.side import Base, SideNetwork, SideShape, read_side, write_side
from mdi_training.features import Features
from mdi_training.side_training import SideModule, SideTraining
from secondaries import cluster_of, secondaries
from test_own_families import expected, made
from tiny_checkpoint import VOCAB, encode, tiny_gpt, tokenizer, write_checkpoint

TEXTS = [
    "The ring is closed link by link. The starter sends a frame, the next node computes and sends it on.",
    "Every node keeps a cache for each sequence. Who are you? Where have you been all the time?",
    "The last one brings it home. " * 4,
    "Every node keeps a cache for each sequence. Who are you? Where have you been all the time?",
    "Who are you?",
]
FLAGS = (
    "--epochs",
    "70",
    "--batch-size",
    "2",
    "--lr",
    "0.003",
    "--taps",
    "1,3",
    "--width",
    "12",
    "--sequence-length",
    "64",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("finetune") / "tiny", with_end=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("data") / "texts.jsonl", [{"text": text} for text in TEXTS])


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def finetune(checkpoint: Path, data: Path, out: Path, *flags: str) -> int:
    given = ("--ckpt", str(checkpoint), "--data", str(data), "--out", str(out), "--device", "cpu", "--dtype", "float32")
    return launch("finetune", [*given, *(FLAGS if "--taps" not in flags else ()), *flags])


def results(out: Path) -> tuple[bytes, bytes]:
    return (out / "losses.csv").read_bytes(), (out / SIDE_FILE).read_bytes()


@pytest.fixture(scope="module")
def alone(checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result on one node."""
    out = tmp_path_factory.mktemp("alone") / "out"
    assert finetune(checkpoint, data, out) == 0
    return out


def losses(out: Path) -> list[float]:
    return [float(line.split(",")[1]) for line in results(out)[0].decode().split()[1:]]


@pytest.mark.parametrize("n_nodes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_loss_curve_is_the_same_on_any_number_of_nodes(
    n_nodes: int, alone: Path, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    assert finetune(checkpoint, data, tmp_path / "out", "--nodes", str(n_nodes)) == 0
    assert results(tmp_path / "out") == results(alone)
    curve = losses(alone)
    assert len(curve) >= 200 and curve[-1] < 0.8 * curve[0]


@pytest.mark.slow
def test_a_node_that_is_killed_changes_no_loss(
    alone: Path, checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, killed, others = Features.add, list[int](), set(psutil.Process().children())

    def add_and_kill(self: Features, index: int, first: int, rows: np.ndarray) -> None:
        add(self, index, first, rows)
        if not killed:
            own = set(psutil.Process().children()) - others  # a server of other tests may be among these
            victim = max(own, key=psutil.Process.create_time)
            killed.append(victim.pid)
            victim.kill()

    monkeypatch.setattr(Features, "add", add_and_kill)
    assert finetune(checkpoint, data, tmp_path / "out", "--nodes", "3", "--frames", "1") == 0
    assert killed and results(tmp_path / "out") == results(alone)


@pytest.mark.slow
def test_what_was_interrupted_goes_on_to_the_same_bits(
    alone: Path, checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the ring's work, and in the middle of a pass over the examples."""
    out, finish, computed = tmp_path / "out", Features.finish, list[int]()

    def finish_and_break(self: Features, index: int) -> None:
        finish(self, index)
        computed.append(index)
        if len(computed) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Features, "finish", finish_and_break)
        assert finetune(checkpoint, data, out) == 130
    assert finetune(checkpoint, data, out) == 2, "it is there, and not meant to be replaced"
    step, n_steps = SideTraining.step, 5

    def step_and_stop(self: SideTraining) -> float:
        found = step(self)
        if self.n_steps == n_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(SideTraining, "step", step_and_stop)
        patch.setattr(Features, "finish", lambda self, index: (computed.append(index), finish(self, index))[1])
        assert finetune(checkpoint, data, out, "--resume") == 128 + signal.SIGTERM
    n_examples = len(computed)
    assert len(set(computed)) == n_examples, "no example went round the ring twice"
    assert len((out / "losses.csv").read_text().split()) == 1 + n_steps
    assert finetune(checkpoint, data, out, "--resume") == 0 and len(computed) == n_examples
    assert results(out) == results(alone)


@pytest.mark.slow
def test_the_disk_is_private_and_reckoned_before_anything_is_computed(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert finetune(checkpoint, data, out, "--keep-features") == 0
    work = out / "work"
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in work.iterdir()}
    assert stat.S_IMODE(work.stat().st_mode) == 0o700 and set(files.values()) == {0o600}
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("outputs of blocks"))
    n_rows = sum(min(65, len(encode(text)) - i) - 1 for text in TEXTS for i in range(0, len(encode(text)) - 1, 64))
    n_bytes = n_rows * 3 * (4 + 2 * tiny_gpt().config.n_embd)
    assert (work / "features.bin").stat().st_size == n_bytes and f"of {n_rows:,} tokens" in said
    assert said.startswith("outputs of blocks 1, 3, the last one: 3 x ")
    assert finetune(checkpoint, data, out, "--resume") == 0 and not work.exists(), "removed at the end"

    def no_run(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was sent")

    monkeypatch.setattr(Run, "open", no_run)
    monkeypatch.setattr("mdi.checkpoint.disk_space.free_bytes", lambda folder: n_bytes - 1)
    assert finetune(checkpoint, data, tmp_path / "other") == 2
    assert "--taps" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_damaged_outputs_are_computed_again(checkpoint: Path, data: Path, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert finetune(checkpoint, data, out, "--keep-features") == 0
    (out / "work" / "state.safetensors").unlink()
    stored = bytearray((out / "work" / "features.bin").read_bytes())
    stored[100] ^= 1
    (out / "work" / "features.bin").write_bytes(bytes(stored))
    assert finetune(checkpoint, data, out, "--resume") == 0
    assert results(out) == results(alone)


@pytest.mark.slow
def test_eight_bits_and_int8_blocks_learn_as_well(alone: Path, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    flags = ("--feature-bits", "8", "--wire-dtype", "fp16", "--nodes", "2", "--quantize", "int8")
    assert finetune(checkpoint, data, tmp_path / "out", *flags) == 0
    found, exact = losses(tmp_path / "out")[:40], losses(alone)[:40]
    assert found != exact and found == pytest.approx(exact, rel=0.05)


@pytest.mark.slow
def test_kept_logits_give_the_same_losses(
    alone: Path, checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To what float16 rounds; and a damaged or interrupted file of them is mended, to the same bits."""
    out, work = tmp_path / "out", tmp_path / "out" / "work"
    assert finetune(checkpoint, data, out, "--keep-logits", "--keep-features") == 0
    first = results(out)
    said, n_logits = capsys.readouterr().out, tiny_gpt().config.padded_vocab_size
    assert f"and {n_logits} logits for each of" in said and "head: " in said
    n_rows = (work / "features.bin").stat().st_size // (3 * (4 + 2 * tiny_gpt().config.n_embd))
    assert (work / "logits.bin").stat().st_size == 2 * n_logits * n_rows
    assert {stat.S_IMODE(path.stat().st_mode) for path in work.iterdir()} == {0o600}
    found, exact = losses(out), losses(alone)
    assert found != exact and found[:40] == pytest.approx(exact[:40], rel=1e-3)
    (work / "state.safetensors").unlink()
    stored = bytearray((work / "logits.bin").read_bytes())
    stored[101] ^= 64
    (work / "logits.bin").write_bytes(bytes(stored))
    assert finetune(checkpoint, data, out, "--keep-logits", "--resume") == 0
    assert results(out) == first and not work.exists()


def outputs(ids: list[int]) -> list[torch.Tensor]:
    """Of each block of the reference, (n, n_embd)."""
    gpt, seen = tiny_gpt(), list[torch.Tensor]()
    hooks = [block.register_forward_hook(lambda module, args, y: seen.append(y[0])) for block in gpt.transformer.h]
    with torch.no_grad():
        gpt(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return seen


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "three": (3, {}),
    "a window": (1, {"weight_memory": WindowMemory(window=WindowOptions(2))}),
}


@pytest.mark.parametrize("name", ["alone", "three", "a window"])
def test_rows_are_those_of_the_reference_once_each_and_in_order(name: str, checkpoint: Path, tmp_path: Path) -> None:
    n_nodes, options = RUNS[name]
    texts = [encode("The ring is closed link by link. " * 12), encode("Who are you?"), encode("Who are you?")]
    begins = [0, 0, len(texts[2]) - 1]
    with secondaries(n_nodes - 1, tmp_path) as nodes:
        made = StarterOptions(
            ckpt=checkpoint,
            cache_dir=tmp_path,
            prompt_style="none",
            device="cpu",
            dtype="float32",
            placement="even",
            **options,
        )
        nodes_of_run = GivenNodes(cluster_of(nodes) if nodes else standalone())
        with Run(nodes_of_run, made, max(map(len, texts)), n_texts=2, taps=(0, 3)) as run:
            for ids, begin in zip(texts, begins, strict=True):
                pieces: list[tuple[int, np.ndarray]] = []
                request = run.submit_rows(ids, begin, lambda first, rows, pieces=pieces: pieces.append((first, rows)))
                assert wait_for_event(request.events).finish_reason == "length"
                rows = np.concatenate([rows for _, rows in pieces], axis=1)
                assert [first for first, _ in pieces] == [
                    begin + sum(p.shape[1] for _, p in pieces[:i]) for i in range(len(pieces))
                ]
                seen = outputs(ids)
                for found, block in zip(rows, (-1, 0, 3), strict=True):
                    torch.testing.assert_close(torch.from_numpy(found), seen[block][begin:], atol=1e-4, rtol=1e-4)
            with pytest.raises(UsageError):
                run.submit_rows(texts[1], len(texts[1]), lambda first, rows: None)


def side_of(checkpoint: Path, folder: Path, taps: tuple[int, ...] = (1, 3), **changes: Any) -> SideModule:
    """A side network for the tiny model that says something, written into `folder`."""
    with Run(
        GivenNodes(standalone()), StarterOptions(ckpt=checkpoint, device="cpu", dtype="float32"), 4, n_texts=1
    ) as run:
        from mdi.run.identity import base_of

        base = base_of(run.model.weights)
    fields: dict[str, Any] = {"base": base, "n_embd": tiny_gpt().config.n_embd, "taps": taps, "width": 10, "head": "lm"}
    module = SideModule(SideShape(**{**fields, **changes}), seed=3)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(4)
        for name in ("out", "bias"):
            if name in module.weights:
                module.weights[name].normal_(0, 0.4, generator=generator)
    write_side(folder, module.shape, module.tensors())
    return module


def greedy_with(module: SideModule, text: str, n_tokens: int) -> list[int]:
    """The reference: litgpt's whole model, its blocks' outputs, and the side network in torch, for every token."""
    gpt, ids = tiny_gpt(), encode(text)
    n_prompt = len(ids)
    with torch.no_grad():
        for _ in range(n_tokens):
            seen = outputs(ids)
            rows = module(seen[-1][-1:], [seen[tap][-1:] for tap in module.shape.taps])
            ids.append(int(gpt.lm_head(gpt.transformer.ln_f(rows))[0].argmax()))
    return ids[n_prompt:]


@pytest.mark.parametrize("n_nodes, draft", [(1, "none"), (3, "none"), (3, "auto")])
def test_texts_are_those_of_the_reference_with_the_side_network(
    n_nodes: int, draft: str, checkpoint: Path, tmp_path: Path
) -> None:
    module = side_of(checkpoint, tmp_path / "side")
    text, n_tokens = "Every node keeps a cache for each sequence. Every node", 24
    expected = greedy_with(module, text, n_tokens)
    with secondaries(n_nodes - 1, tmp_path) as nodes:
        made = StarterOptions(
            ckpt=checkpoint, cache_dir=tmp_path, prompt_style="none", device="cpu", dtype="float32", placement="even",
            adapter=(str(tmp_path / "side"),), draft=draft,
        )  # fmt: skip
        with Run(GivenNodes(cluster_of(nodes) if nodes else standalone()), made, n_tokens, [text] * 2) as run:
            identity = run.identity
            for other in (text, "Who are you?"):  # in company, too
                run.submit(other, encode(other), SamplingParams(n_tokens, temperature=0))
            run.read()
            assert run.samples[0].token_ids == expected
    with Run(GivenNodes(standalone()), StarterOptions(**{**vars(made), "adapter": ()}), n_tokens, [text] * 2) as run:
        run.submit(text, encode(text), SamplingParams(n_tokens, temperature=0))
        run.read()
        assert run.samples[0].token_ids != expected and run.identity != identity


@pytest.mark.slow
@pytest.mark.parametrize("n_nodes", [1, 3])
def test_each_text_has_the_side_network_that_it_names(n_nodes: int, checkpoint: Path, tmp_path: Path) -> None:
    """Of several in the same frames, which read other blocks, beside an adapter in PEFT's form; and none if it names none."""
    text, n_tokens = "Every node keeps a cache for each sequence. Every node", 16
    given = []
    wanted = {}
    for name, taps in (("a", (1, 3)), ("b", (2,)), ("c", (0, 1, 2))):
        module = side_of(checkpoint, tmp_path / name, taps=taps)
        given.append(f"{name}={tmp_path / name}")
        wanted[name] = greedy_with(module, text, n_tokens)
    write_adapter(tmp_path / "lora", tiny_gpt(), 1)
    lora = f"lora={tmp_path / 'lora'}"
    plain = StarterOptions(
        ckpt=checkpoint, cache_dir=tmp_path, prompt_style="none", device="cpu", dtype="float32", placement="even",
        adapter=(lora,),
    )  # fmt: skip
    params = SamplingParams(n_tokens, temperature=0)
    with secondaries(n_nodes - 1, tmp_path) as nodes:
        source = GivenNodes(cluster_of(nodes) if nodes else standalone())
        with Run(source, plain, n_tokens, [text] * 2) as run:
            for name in ("", "lora"):
                run.submit(text, encode(text), params, adapter=name)
            run.read()
            wanted |= {name: run.samples[i].token_ids for i, name in enumerate(("", "lora"))}
        with Run(source, replace(plain, adapter=(given[0], lora, *given[1:])), n_tokens, [text] * 5) as run:
            assert set(run.adapters) == {"a", "b", "c", "lora"}
            names = ["b", "", "lora", "a", "c"]
            for name in names:
                request = run.submit(text, encode(text), params, adapter=name).request
                assert request is not None and adapter_of(request.seq_id) == (name == "lora"), "the number on the nodes"
            run.read()
            assert {name: run.samples[i].token_ids for i, name in enumerate(names)} == wanted
    assert len(set(map(tuple, wanted.values()))) == 5


def test_a_row_has_the_same_bits_in_any_company_and_those_of_torch(checkpoint: Path, tmp_path: Path) -> None:
    module = side_of(checkpoint, tmp_path, width=7)
    network, generator = read_side(tmp_path, 2), torch.Generator().manual_seed(1)
    rows = [30 * torch.randn(9, module.shape.n_embd, generator=generator) for _ in range(3)]
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(network(*(r.numpy() for r in rows))), module(rows[0], rows[1:]), atol=1e-4, rtol=1e-5
        )
    whole = network(*(r.numpy() for r in rows))
    for i in range(9):
        assert np.array_equal(network(*(r[i : i + 1].numpy() for r in rows))[0], whole[i])


def test_gradients_are_finite_differences(checkpoint: Path, tmp_path: Path) -> None:
    module = side_of(checkpoint, tmp_path).double()
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randn(5, module.shape.n_embd, generator=generator, dtype=torch.float64) for _ in range(3)]
    targets = torch.tensor([1, 2, 3, 0, 1])

    def loss() -> torch.Tensor:
        return functional.cross_entropy(module(rows[0], rows[1:]), targets)

    loss().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        at = int(parameter.grad.abs().argmax())
        with torch.no_grad():
            flat, eps = parameter.view(-1), 1e-6
            flat[at] += eps
            more = float(loss())
            flat[at] -= 2 * eps
            less = float(loss())
            flat[at] += eps
        assert (more - less) / (2 * eps) == pytest.approx(float(parameter.grad.view(-1)[at]), rel=1e-4), name


def test_the_first_loss_is_that_of_the_model_itself(checkpoint: Path, tmp_path: Path) -> None:
    """Of the tokens of a completion alone."""
    data = write_lines(tmp_path / "one.jsonl", [{"prompt": "Who are you?", "completion": " The ring is closed."}])
    assert finetune(checkpoint, data, tmp_path / "out", "--epochs", "1") == 0
    prompt, rest = encode("Who are you?"), encode(" The ring is closed.")
    with torch.no_grad():
        logits = tiny_gpt()(torch.tensor([[*prompt, *rest]]))[0, len(prompt) - 1 : -1]
    expected = float(functional.cross_entropy(logits, torch.tensor(rest)))
    assert float((tmp_path / "out" / "losses.csv").read_text().split(",")[-1]) == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
@pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")
@pytest.mark.parametrize("family", ["bloom", "falcon-rw", "gpt2", "opt", "opt-behind", "glm", "minimax", "gpt-oss"])
def test_blocks_that_only_the_kernels_compute_are_a_base(family: str, tmp_path: Path) -> None:
    """The first loss is that of the definitions in numpy; nodes change no loss; texts are those of the network in torch."""
    source, n_tokens = made(family, tmp_path, vocab_size=VOCAB), 12
    tokenizer().save(str(source.path / "tokenizer.json"))
    (source.path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    prompt, rest = "Who are you?", " The ring is closed link by link."
    data = write_lines(tmp_path / "one.jsonl", [{"prompt": prompt, "completion": rest}])
    flags = ("--epochs", "30", "--taps", "0,1", "--width", "8", "--lr", "0.02", "--sequence-length", "64")
    outs = [tmp_path / "1", tmp_path / "3"]
    for out in outs:
        assert finetune(source.path, data, out, *flags, "--nodes", out.name) == 0
    assert results(outs[0]) == results(outs[1])
    ids = encode(prompt) + encode(rest)
    logits = expected(source, np.array(ids))[len(encode(prompt)) - 1 : -1]
    first = float(functional.cross_entropy(torch.from_numpy(logits), torch.tensor(encode(rest))))
    curve = losses(outs[0])
    assert curve[0] == pytest.approx(first, rel=2e-3) and curve[-1] < 0.5 * curve[0]

    network, stages = read_side(outs[0]), [base_stage(source, n_blocks) for n_blocks in (3, 1, 2)]
    text = encode(prompt)
    for _ in range(n_tokens):
        slices = [Slice(0, 0, len(text), 1)]
        x = stages[0].embed(np.array(text), slices)
        rows = [stage(x.copy(), slices)[-1:] for stage in stages]
        text.append(int(stages[0].head(network(*rows))[0].argmax()))
    with secondaries(2, tmp_path) as nodes:
        options = StarterOptions(
            ckpt=source.path, cache_dir=tmp_path, prompt_style="none", device="cpu", dtype="float32", placement="even",
            adapter=(str(outs[0]),),
        )  # fmt: skip
        with Run(GivenNodes(cluster_of(nodes)), options, 40, n_texts=1) as run:
            run.submit(prompt, encode(prompt), SamplingParams(n_tokens, temperature=0))
            run.read()
            assert encode(prompt) + run.samples[0].token_ids == text
    plain = expected(source, np.array(text))[len(encode(prompt)) - 1 : -1].argmax(1)
    assert plain.tolist() != text[len(encode(prompt)) :]


def base_stage(source: LitCheckpoint, n_blocks: int) -> KernelStage:
    """The first blocks of a model, with embedding and head."""
    weights = Resident(stage_parts(0, n_blocks, starter=True), source.weights)
    stage = KernelStage(spec_of(source.config), 0, n_blocks, weights)
    stage.prepare(64)
    return stage


@pytest.mark.slow
def test_classes_are_learned_and_told_apart(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task of our own: does the text speak of the ring or of a node."""
    words = {"ring": "The ring is closed, link", "node": "Every node keeps a cache, time"}
    rows = [{"text": f"{text} {i}.", "label": label} for i in range(12) for label, text in words.items()]
    flags = ("--head", "classes", "--epochs", "30", "--lr", "0.01", "--width", "8", "--taps", "2", "--nodes", "2")
    train, others = write_lines(tmp_path / "a.jsonl", rows[:16]), write_lines(tmp_path / "b.jsonl", rows[16:])
    assert finetune(checkpoint, train, tmp_path / "out", *flags, "--eval", str(others)) == 0
    assert "held out after: loss 0." in (said := capsys.readouterr().out) and "100.0% right" in said
    given = ("--ckpt", str(checkpoint), "--out", str(tmp_path / "out"), "--predict", str(others), "--device", "cpu")
    assert launch("finetune", [*given, "--dtype", "float32"]) == 0
    told = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert told == [row["label"] for row in rows[16:]]
    assert launch("sample", ["--ckpt", str(checkpoint), "--adapter", str(tmp_path / "out"), "--device", "cpu"]) == 2
    assert "writes no text" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--method", "full"), "invalid choice: 'full'"),
        (("--taps", "4"), ""),
        (("--keep-logits", "--head", "classes"), "only with --head lm"),
        (("--taps", "1,4,5"), "blocks below 4"),
        (("--taps", "3,1"), "rising"),
        (("--quantize", "auto"), "say which format"),
        (("--sequence-length", "9999"), "context of"),
        (("--predict", "x.jsonl"), "--data FILE to learn from, or --predict"),
        (("--eval", "missing.jsonl"), "does not exist"),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_anything_is_sent(
    flags: tuple[str, ...], words: str, checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def no_run(*args: Any, **kwargs: Any) -> None:
        raise MdiError("the run began")

    monkeypatch.setattr(Run, "open", no_run)
    try:
        status = finetune(checkpoint, data, tmp_path / "out", *flags)
    except SystemExit as e:  # of the parser
        status = int(e.code or 0)
    assert (status, words) == (1, "") or (status == 2 and words in capsys.readouterr().err)


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        ('{"txt": "x"}', "'text' is no text"),
        ('{"text": 5}', "'text' is no text"),
        ('{"prompt": "a"}', "'text' is no text"),
        ('{"prompt": "", "completion": "b"}', "'prompt' is no text"),
        ("", "no examples"),
        ('{"prompt": "a", "completion": "' + "The ring. " * 99 + '"}', "a text can have 64"),
    ],
)
def test_a_wrong_line_is_named(
    line: str, words: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    assert finetune(checkpoint, path, tmp_path / "out") == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_strangers_side_network_is_checked(checkpoint: Path, tmp_path: Path) -> None:
    module = side_of(checkpoint, tmp_path / "good")
    good = (tmp_path / "good" / SIDE_FILE).read_bytes()

    def read(data: bytes) -> SideNetwork:
        (tmp_path / "bad").mkdir(exist_ok=True)
        (tmp_path / "bad" / SIDE_FILE).write_bytes(data)
        return read_side(tmp_path / "bad")

    assert read(good).shape == module.shape
    for field, old, new in [
        ("width", "10", "11"), ("width", "10", "-1"), ("taps", "[1, 3]", "[3, 1]"), ("head", '\\"lm\\"', '\\"no\\"'),
        ("version", "1", "2"), ("n_embd", "48", "49"),
    ]:  # fmt: skip
        before, after = (f'\\"{field}\\": {value}'.encode() for value in (old, new))
        assert good.count(before) == 1
        with pytest.raises(CheckpointError):
            read(good.replace(before, after))
    for data in (good[:-4], good + bytes(4), good[:-4] + np.float32("nan").tobytes()):
        with pytest.raises(CheckpointError):
            read(data)
    with pytest.raises(UsageError):
        read_side(tmp_path)
    for changes in ({"n_embd": 8}, {"taps": (1, 99)}, {"base": Base("other", "0" * 64, "0" * 64, "float32")}):
        side_of(checkpoint, tmp_path / "other", **changes)
        made = StarterOptions(ckpt=checkpoint, device="cpu", dtype="float32", adapter=(str(tmp_path / "other"),))
        with (
            pytest.raises(UsageError, check=lambda e: e.code == "shape"),
            Run(GivenNodes(standalone()), made, 4, n_texts=1),
        ):
            pass


def init_request(n_layer: int) -> InitRequest:
    model, part = ModelId("m", ModelConfig(n_layer=n_layer), "c", "float32"), PartSpec("block.0", "a" * 64, 10)
    return InitRequest(
        run="0" * 16, epoch="0" * 16, index=1, names=("a", "b"), placement="p", next_addr="127.0.0.1", next_port=1, model=model,
        blocks=(0, 1), parts=(part,), extent=Extent(9),
    )  # fmt: skip


@pytest.mark.parametrize("taps", [5, "1", [1, 1], [2, 1], [-1], [5], [True], [0.0], list(range(65))])
def test_blocks_that_the_model_does_not_have_are_refused_by_a_node(taps: Any) -> None:
    told = init_request(5 if taps != list(range(65)) else 100).to_json()
    with pytest.raises(ControlError) as e:
        InitRequest.from_json({**told, "taps": taps})
    assert e.value.status == 400 and "taps" in str(e.value)
    assert InitRequest.from_json({**told, "taps": [0, 4]}).taps == (0, 4)
