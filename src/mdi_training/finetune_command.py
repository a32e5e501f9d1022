r"""Adapt a model to examples over a ring whose nodes keep their blocks as they are, packed as for generation.

With --method side the ring computes each example once. The outputs of some blocks come back and are kept on the disk of
this machine, readable by you alone. From them a side network learns here, in torch; after the first pass the ring is not
needed any more. It is written to --out, and used with --adapter DIR by starter, run, sample, chat and serve.

With --method lora, prompt, deep-prompt and prefix each step goes through all blocks, forward and backward. The nodes need
torch, and compute over the numbers that their packed weights stand for; what is learned and the optimizer are here. What a
lost node was asked is asked again. The result is in PEFT's form, and used with --adapter NAME=DIR.

examples:
  mdi finetune --ckpt org/model --data texts.jsonl --out mine                     on this machine alone
  mdi finetune --ckpt org/model --nodes 3 --data texts.jsonl --out mine           a ring of three processes here
  mdi finetune --ckpt org/model --nodes-config nodes.json --data texts.jsonl --out mine --resume
      over the nodes of that file; goes on with what was interrupted
  mdi finetune --ckpt org/model --nodes 3 --method lora --lora-targets query,value,mlp --data texts.jsonl --out mine
  mdi finetune --ckpt org/model --head classes --data mails.jsonl --eval others.jsonl --out spam
  mdi finetune --ckpt org/model --predict new.jsonl --out spam                    prints a label for each text
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import queue
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.cancel import Cancel
from mdi.errors import Code, EngineError, UsageError
from mdi.kernels.weight_formats import AUTO
from mdi.model.spec import ModelSpec
from mdi.spec.combinations import OWN_RING, facts_of, refuse
from mdi.spec.options import (
    ACCESS,
    COMMON,
    LORA,
    MODEL,
    SIDE,
    SIDE_FILE,
    TUNING,
    Options,
    TuningOptions,
    own_or_packed,
)
from mdi.spec.parser import Parser

if TYPE_CHECKING:
    import numpy as np

    from mdi.run.nodes import NodeSource
    from mdi.run.run import Run
    from mdi.stages.side import SideShape
    from mdi.stages.starter_weights import StarterWeights
    from mdi_training.examples import Example
    from mdi_training.features import FeatureKind, Features
    from mdi_training.frozen_head import FrozenHead
    from mdi_training.ring_training import RingTraining, TunedModel
    from mdi_training.side_training import SideTraining
    from mdi_training.tuned_tensors import TuningKind
    from mdi_training.tuning import Steps, Tuning, TuningSettings

WORK = "work"  # the folder in --out for what is needed until the end
N_TEXTS = 8  # at the same time in the ring
DEFAULT_SEED = 10137
TEXT_LIMIT = 2048  # tokens of a text without --sequence-length, if the model allows it

logger = logging.getLogger("mdi")


FIRST = (
    "--ckpt", "--quantize", "--nodes", "--nodes-config", "--key", "--data",
    "--eval", "--method", "--epochs", "--lr", "--out", "--resume", "--verb",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    parser.options("model", *MODEL, quantize={"read": _format})
    parser.options(
        "nodes", "nodes", "nodes_config", "devices", *ACCESS, "layers", "placement", "fixed", "silence_s", "replay_memory",
        "wait_s", "wire_dtype", "n_frames",
        nodes={"help": "a ring of N processes on this machine"},
        nodes_config={"help": "nodes file: a ring of these nodes"},
        devices={"help": "with --nodes: device of each node, starter first"},
    )  # fmt: skip
    parser.options(
        "fine-tuning", *TUNING, "out", "resume", "seed",
        out={"help": "folder for the result"},
        resume={"help": "go on with what was interrupted in --out", "metavar": None, "nargs": "?", "const": ""},
        seed={"help": "seed of the first weights and of the order of the examples (default: 10137)"},
    )  # fmt: skip
    parser.options("fine-tuning", "prompt_style")
    parser.options(None, *COMMON)


def run(options: Options, cancel: Cancel) -> int:
    from mdi.checkpoint.adapters import WEIGHTS_FILE
    from mdi.cli.access import with_machines
    from mdi.cli.session import check_cut, on_processes, run_options, with_model
    from mdi.host.device import load_torch

    asked = options.tuning
    if options.out is None or (asked.data is None) == (asked.predict is None):
        raise UsageError("give --out DIR, and --data FILE to learn from, or --predict FILE", code=Code.FLAGS)
    if options.nodes is not None:
        refuse({**facts_of(options), OWN_RING: OWN_RING}, OWN_RING)
    options = replace(options, key=with_machines(options).key)
    options = with_model(options, cancel)
    check_cut(options, 1 if options.nodes is None else options.nodes)
    out, options = options.out, run_options(options if options.nodes is None else on_processes(options))
    load_torch("fine-tuning")
    with ExitStack() as stack:
        model = _Model(options)
        stack.callback(model.close)
        if asked.data is None:
            assert out is not None
            is_side = not (out / WEIGHTS_FILE).exists()
            return (_predict if is_side else _predict_through)(options, model, cancel)
        return (_learn if asked.method == SIDE else _learn_through)(options, model, cancel)


def _format(text: str, flag: str) -> str:
    if text == AUTO:
        raise UsageError(
            f"{flag} auto: say which format, so that an interrupted fine-tuning can go on", code=Code.FLAGS
        )
    return own_or_packed(text, flag)


class _Model:
    """The model's files, without any node.

    Attributes:
        weights: of all blocks.
        max_length: tokens that an example may have.
    """

    weights: StarterWeights

    def __init__(self, options: Options) -> None:
        from mdi.run.texts import context_length
        from mdi.stages.model_family import ModelFamily

        self._family = ModelFamily()
        self._options = options
        self.weights = weights = self._family.open_weights(options.ckpt, None, 1, None, options.quantize, False)
        try:
            longest = self._family.max_length(weights.model.spec)
            self.max_length = context_length(weights.model.spec, longest, options.sequence_length)
            if options.sequence_length is None:
                self.max_length = min(longest, TEXT_LIMIT)
            self.codec = self._family.open_codec(weights.directory, options.prompt_style)
        except BaseException:
            weights.close()
            raise

    @property
    def identity(self) -> str:
        """Stands for all that the numbers of the blocks' outputs depend on."""
        from mdi.run.identity import base_of

        o = self._options
        known = [vars(base_of(self.weights)), o.device, o.dtype, o.quantize, o.kv_dtype, o.wire_dtype]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def head(self, has_classes: bool) -> FrozenHead:
        """Final norm and head, with the numbers that a run has in its format; for classes, see `FrozenHead.of`."""
        from mdi.run.choice import starter_computing
        from mdi_training.frozen_head import FrozenHead

        packing = starter_computing(self._family, self.weights, self._options).packing
        return FrozenHead.of(self.weights.source_of("head"), packing, has_classes)

    def close(self) -> None:
        self.codec.close()
        self.weights.close()


# Learning


def _learn(options: Options, model: _Model, cancel: Cancel) -> int:
    from mdi.run.identity import base_of
    from mdi.stages.side import LM, SideShape, write_side
    from mdi_training.examples import digest_of
    from mdi_training.features import FeatureKind, Features
    from mdi_training.side_training import SideModule, SideTraining

    asked, out = options.tuning, options.out
    assert asked.data is not None and out is not None
    spec, work = model.weights.model.spec, out / WORK
    n_logits = _n_logits(asked, spec)
    examples, n_train, labels = _examples(options, model, model.max_length)
    taps = _taps(asked.taps, spec.n_layer)
    width = asked.width or max(1, spec.width // 8)
    shape = SideShape(base_of(model.weights), spec.width, taps, width, asked.task, labels)
    kind = FeatureKind(digest_of(examples), model.identity, taps, spec.width, asked.feature_bits, n_logits)
    _check_new(options, work, out / SIDE_FILE)
    _say_disk(work, kind, sum(example.n_rows for example in examples))
    settings = _settings(options)
    features = Features(work, kind, examples)
    try:
        ring_s = _compute(options, model, features, examples, cancel)
        head = model.head(False) if asked.task == LM else None
        training = SideTraining(SideModule(shape, settings.seed), head, features, examples, n_train, settings)
        ring_s += _keep_logits(training, sum(example.n_rows for example in examples))
        if (number := _train(training, out, ring_s)[0]) is not None:
            return number
        path = write_side(out, shape, training.module.tensors())
    finally:
        features.close()
    if not asked.keep_features:
        features.remove()
    how = "--predict FILE uses it" if labels else f"--adapter {out} uses it"
    print(f"{path}: {sum(array.size for array in training.module.tensors().values()):,} numbers; {how}", flush=True)
    return 0


def _examples(options: Options, model: _Model, max_length: int) -> tuple[list[Example], int, tuple[str, ...]]:
    """Those to learn from, and behind them those that are held out; the number of the first; the labels. Raises UsageError."""
    from mdi.stages.side import CLASSES
    from mdi_training.examples import class_examples, labels_of, lm_examples, read_rows

    asked = options.tuning
    assert asked.data is not None
    rows = read_rows(asked.data)
    labels: tuple[str, ...] = ()
    make: Callable[..., list[Example]] = partial(lm_examples, codec=model.codec, max_length=max_length)
    if asked.task == CLASSES:
        labels = labels_of(rows)
        make = partial(class_examples, codec=model.codec, max_length=max_length, labels=labels)
    found = make(rows)
    return found + ([] if asked.held_out is None else make(read_rows(asked.held_out))), len(found), labels


def _settings(options: Options) -> TuningSettings:
    from mdi_training.tuning import TuningSettings

    asked = options.tuning
    return TuningSettings(
        asked.epochs, asked.batch_size, asked.lr, DEFAULT_SEED if options.seed is None else options.seed
    )


def _check_new(options: Options, work: Path, result: Path) -> None:
    if options.resume is None and (result.exists() or work.exists()):
        raise UsageError(
            f"{options.out} has a fine-tuning already: give --resume to go on with it, or another --out",
            code=Code.EXISTS,
        )


def _train(
    training: Tuning, out: Path, ring_s: float = 0.0, say_before: Callable[[range], None] | None = None
) -> tuple[int | None, Steps]:
    """All steps that are left, with what is held out before and after.

    Args:
        ring_s: see `train`; say_before: called with the numbers of the examples that are held out.

    Returns:
        the exit status if it was stopped, and what the steps were.
    """
    from mdi_training.interrupt import StopRequest
    from mdi_training.tuning import LOSSES_FILE, STATE_FILE, train

    n, n_train = len(training.examples), training.n_train
    held, what = (range(n_train, n), "held out") if n > n_train else (range(n_train), "examples")
    print(f"{what} before: {training.score(held)}", flush=True)
    if say_before is not None:
        say_before(held)
    has_begun = (out / WORK / STATE_FILE).exists()
    if training.restore(out / WORK):
        print(f"going on after step {training.n_steps} of {training.n_all}", flush=True)
    elif has_begun:
        print("the training before had other settings: it begins again with the first step", flush=True)
    with StopRequest() as stop:
        steps = train(training, out / WORK, out / LOSSES_FILE, lambda: bool(stop), partial(print, flush=True), ring_s)
    if not steps.is_done:
        print(f"stopped after step {training.n_steps} of {training.n_all}; --resume goes on", flush=True)
        return 128 + (stop.number or 0), steps
    print(f"{what} after: {training.score(held)}", flush=True)
    return None, steps


def _taps(asked: tuple[int, ...] | int, n_layer: int) -> tuple[int, ...]:
    """The blocks whose outputs are wanted besides those of the last one. Raises UsageError."""
    from mdi.control.messages import MOST_TAPS

    if isinstance(asked, int):
        n = min(asked, n_layer - 1)
        asked = tuple(sorted({(i + 1) * n_layer // (n + 1) - 1 for i in range(n)}))
    if len(asked) > MOST_TAPS or any(tap >= n_layer - 1 for tap in asked):
        raise UsageError(
            f"--taps: at most {MOST_TAPS} blocks below {n_layer - 1}; the outputs of the last one come always",
            code=Code.VALUE,
        )
    return asked


def _n_logits(asked: TuningOptions, spec: ModelSpec) -> int:
    """Logits of a row that are kept on the disk. Raises UsageError."""
    if not asked.keep_logits:
        return 0
    if asked.task != "lm" or spec.ends.softcap is not None:
        raise UsageError("--keep-logits: only with --head lm, and for models whose logits have no cap", code=Code.FLAGS)
    return spec.n_rows


def _keep_logits(training: SideTraining, n_rows: int) -> float:
    """Have the head's logits kept, if they are to be; returns the seconds that it took."""
    seconds = training.keep_logits()
    if seconds:
        print(f"head: {n_rows:,} tokens in {seconds:.1f} s", flush=True)
    return seconds


def _say_disk(work: Path, kind: FeatureKind, n_rows: int) -> None:
    """Print what the blocks' outputs take, before anything is computed. Raises UsageError if the disk has not so much."""
    from mdi.checkpoint.disk_space import check_disk, free_bytes
    from mdi.units import size
    from mdi_training.features import ADVICE

    n_bytes = n_rows * kind.stored_bytes
    logits = f", and {kind.n_logits:,} logits" if kind.n_logits else ""
    blocks = ", ".join([*map(str, kind.taps), "the last one"])
    print(
        f"outputs of blocks {blocks}: {kind.n_parts} x {kind.n_embd} numbers of {kind.bits} bits{logits} for each of "
        f"{n_rows:,} tokens, {size(n_bytes)} in {work} ({size(free_bytes(work))} free)",
        flush=True,
    )  # fmt: skip
    if not (work / "features.json").exists():
        check_disk(work, n_bytes, "the blocks' outputs", UsageError, ADVICE)


def _compute(options: Options, model: _Model, features: Features, examples: Sequence[Example], cancel: Cancel) -> float:
    """Have the ring compute what is not there yet; returns the seconds that it took."""
    from mdi.units import size

    wanted = features.missing()
    if not wanted:
        return 0.0

    def finish(index: int) -> None:
        features.finish(index)

    run, seconds = _over_ring(options, examples, wanted, features.kind.taps, features.add, finish, cancel)
    n_rows = sum(examples[index].n_rows for index in wanted)
    sent = sum(node.bytes_sent for node in run.metrics().nodes)
    print(
        f"ring: {n_rows:,} tokens in {seconds:.1f} s, {n_rows / seconds:.1f} tokens/s; {size(sent / n_rows)} per token on all "
        f"links, {size(features.kind.row_bytes)} on the disk",
        flush=True,
    )  # fmt: skip
    return seconds


def _over_ring(
    options: Options, examples: Sequence[Example], wanted: Sequence[int], taps: tuple[int, ...],
    take: Callable[[int, int, np.ndarray], None], finish: Callable[[int], None], cancel: Cancel,
) -> tuple[Run, float]:  # fmt: skip
    """Send examples round the ring.

    Args:
        take: gets the number of an example, the position of the first of some of its rows, and the rows, see
            `StarterEngine.submit_rows`; finish: its number when it has all of them.

    Returns:
        the run, which has ended, and the seconds from its first text to its last.
    """
    from mdi.cli import ignore_interrupts
    from mdi.run.run import Run

    n_texts = min(N_TEXTS, len(wanted))
    length = max(len(examples[index].ids) for index in wanted)
    with _nodes(options, cancel) as nodes:
        run = Run(nodes, options, length, n_texts=n_texts, on_close=ignore_interrupts, cancel=cancel, taps=taps)
        with run:
            begin = time.perf_counter()
            _read_all(run, examples, wanted, 2 * n_texts, take, finish)
            seconds = time.perf_counter() - begin
    from mdi.cli import heed_interrupts

    heed_interrupts()
    return run, seconds


def _read_all(
    run: Run, examples: Sequence[Example], wanted: Sequence[int], n_at_once: int,
    take: Callable[[int, int, np.ndarray], None], finish: Callable[[int], None], adapter: str = "",
) -> None:  # fmt: skip
    """See `_over_ring`. Rows and the ends of texts come through one queue, in order."""
    from mdi.engine.sequence import Event, wait_for_event

    came: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting, running = deque(wanted), dict[int, int]()

    def give(index: int, first: int, rows: np.ndarray) -> None:
        came.put((index, first, rows))

    while waiting or running:
        while waiting and len(running) < n_at_once:
            index = waiting.popleft()
            example = examples[index]
            request = run.submit_rows(example.ids, example.read_from, partial(give, index), came, adapter)
            running[request.seq_id] = index
        found: Any = wait_for_event(came)
        if not isinstance(found, Event):
            take(*found)
        elif found.finish_reason is not None:
            index = running.pop(found.seq_id)
            if found.finish_reason != "length":
                run.raise_failure()
                raise EngineError(f"example {index} was not computed: {found.finish_reason}")
            finish(index)


# Learning through the blocks


def _learn_through(options: Options, model: _Model, cancel: Cancel) -> int:
    from mdi.checkpoint.adapters import WEIGHTS_FILE, weights_hash
    from mdi_training.ring_training import RingTraining, TunedModel, embedding_of
    from mdi_training.tuned_tensors import n_numbers, new_tensors

    asked, out, config = options.tuning, options.out, model.weights.config
    assert out is not None
    n_before = 0 if asked.method == LORA else asked.prompt_length
    if n_before >= model.max_length:
        raise UsageError(
            f"--prompt-length {n_before}: a text can have {model.max_length} tokens in all", code=Code.LENGTH
        )
    examples, n_train, labels = _examples(options, model, model.max_length - n_before)
    kind = _kind(options, labels)
    new_tensors(kind, config, 0, model.weights.source_of)  # complain now
    settings, head = _settings(options), model.head(bool(kind.labels))
    _check_new(options, out / WORK, out / WEIGHTS_FILE)
    (out / WORK).mkdir(parents=True, exist_ok=True, mode=0o700)
    length = n_before + max(len(one.ids) for one in examples)
    with _nodes(options, cancel) as nodes:
        with _tuning_run(nodes, options, length, cancel) as run:
            tuned = new_tensors(kind, config, settings.seed, model.weights.source_of, embedding_of(run))
            through, known = TunedModel(run, tuned, head), weights_hash(model.weights.sources[0])
            base = f"{model.identity} {known}"
            training = RingTraining(through, examples, n_train, settings, asked.micro_batches, base)
            training.check()
            print(f"{n_numbers(tuned.named.values()):,} numbers are learned; {training.bytes_told}", flush=True)
            say = None if labels else partial(_say_kernels, run, examples, head, through, "")
            number, steps = _train(training, out, say_before=say)
            if number is not None:
                return number
            _say_rate(training, steps)
            path = tuned.write(out, str(config.name), known)
            shutil.rmtree(out / WORK, ignore_errors=True)
        if not labels:
            options = replace(options, adapter=(f"learned={out}",))
            with _tuning_run(nodes, options, length, cancel) as run:
                model_of = TunedModel(run, tuned, head)
                _say_kernels(run, examples, head, model_of, "learned", range(n_train, len(examples)) or range(n_train))
    how = f"--adapter {out} uses it, with the name of the folder, or --adapter NAME={out}"
    how = "--predict FILE uses it" if labels else how
    print(f"{path}: {how}", flush=True)
    return 0


def _kind(options: Options, labels: tuple[str, ...]) -> TuningKind:
    from mdi_training.tuned_tensors import TuningKind

    asked = options.tuning
    return TuningKind(asked.method, asked.lora_r, asked.lora_alpha, asked.lora_targets, asked.prompt_length, labels)


@contextlib.contextmanager
def _tuning_run(nodes: NodeSource, options: Options, length: int, cancel: Cancel) -> Iterator[Run]:
    from mdi.cli import heed_interrupts, ignore_interrupts
    from mdi.run.run import Run

    with Run(nodes, options, length, n_texts=N_TEXTS, on_close=ignore_interrupts, cancel=cancel, gradients=True) as run:
        yield run
    heed_interrupts()


def _say_kernels(
    run: Run, examples: Sequence[Example], head: FrozenHead, model: TunedModel, adapter: str, held: Sequence[int]
) -> None:
    """Print the loss of these examples in torch, as they are learned, and in the kernels, as texts are generated.

    Args:
        adapter: what the kernels compute with; "": the model alone, also in torch.
    """
    import torch

    losses = [0.0, 0.0]

    def take(index: int, first: int, rows: np.ndarray) -> None:
        begin = first - examples[index].read_from
        targets = torch.tensor(examples[index].targets[begin : begin + rows.shape[1]])
        losses[1] += float(head.loss(torch.tensor(rows[0]), targets).loss)

    with torch.no_grad():
        learned = model.learned() if adapter else None
        for index in held:
            losses[0] += float(model.loss([examples[index]], learned).loss)
        _read_all(run, examples, held, 2 * N_TEXTS, take, lambda index: None, adapter)
    n_rows = sum(examples[index].n_rows for index in held)
    here, there = (loss / n_rows for loss in losses)
    what = "with what was learned" if adapter else "the model alone"
    print(
        f"{what}: loss {here:.4f} in torch, as it is trained, {there:.4f} in the kernels, as texts are generated "
        f"({there - here:+.4f})", flush=True,
    )  # fmt: skip


def _say_rate(training: RingTraining, steps: Steps) -> None:
    if (rate := steps.tokens_per_s) is not None:
        print(f"{rate:,.1f} tokens/s forward and backward; {training.bytes_told}", flush=True)


def _predict_through(options: Options, model: _Model, cancel: Cancel) -> int:
    import torch

    from mdi.checkpoint.adapters import weights_hash
    from mdi_training.examples import class_examples, read_rows
    from mdi_training.ring_training import TunedModel
    from mdi_training.tuned_tensors import SCORE, read_tensors

    assert options.out is not None and options.tuning.predict is not None
    base = weights_hash(model.weights.sources[0])
    tuned = read_tensors(options.out, model.weights.config, model.weights.source_of, base)
    if not tuned.kind.labels:
        raise UsageError(f"--predict: {options.out} knows no labels, and writes texts", code=Code.FLAGS)
    longest = model.max_length - tuned.kind.length
    examples = class_examples(read_rows(options.tuning.predict), model.codec, longest, None)
    length = tuned.kind.length + max(len(one.ids) for one in examples)
    with _nodes(options, cancel) as nodes, _tuning_run(nodes, options, length, cancel) as run:
        through = TunedModel(run, tuned, model.head(True))
        for i in range(0, len(examples), options.tuning.batch_size):
            with torch.no_grad():
                rows = through(examples[i : i + options.tuning.batch_size], through.learned())
                logits = through.classes(rows, tuned.named[SCORE])
            for parts in torch.softmax(logits.double(), 1):
                best = int(parts.argmax())
                told = {"label": tuned.kind.labels[best], "probability": round(float(parts[best]), 4)}
                print(json.dumps(told), flush=True)
    return 0


def _nodes(options: Options, cancel: Cancel) -> NodeSource:
    from mdi.cli.session import nodes_of, processes_of
    from mdi.run.local import LocalRing
    from mdi.spec.cluster import load_cluster, standalone

    if options.nodes is not None:
        return processes_of(options, options.nodes, LocalRing, options.cores)
    path = options.nodes_config
    return nodes_of(options, standalone if path is None else partial(load_cluster, path))


# Using classes


def _predict(options: Options, model: _Model, cancel: Cancel) -> int:
    """Print, for each text, its label and how probable the network finds it."""
    import numpy as np

    from mdi.host.threads import n_threads
    from mdi.run.identity import base_of
    from mdi.stages.side import CLASSES, check_base, read_side
    from mdi_training.examples import class_examples, read_rows

    assert options.out is not None and options.tuning.predict is not None
    network = read_side(options.out, n_threads())
    shape: SideShape = network.shape
    check_base(shape, base_of(model.weights), model.weights.model.spec, options.out)
    if shape.head != CLASSES:
        raise UsageError(f"--predict: {options.out} knows no labels, and writes texts: use --adapter", code=Code.FLAGS)
    examples = class_examples(read_rows(options.tuning.predict), model.codec, model.max_length, None)
    logits: dict[int, np.ndarray] = {}

    def take(index: int, first: int, rows: np.ndarray) -> None:
        logits[index] = network.classify(*rows)[0].astype(np.float64)

    _over_ring(options, examples, range(len(examples)), shape.taps, take, lambda index: None, cancel)
    for index in range(len(examples)):
        parts = np.exp(logits[index] - logits[index].max())
        best = int(parts.argmax())
        print(
            json.dumps({"label": shape.labels[best], "probability": round(float(parts[best] / parts.sum()), 4)}),
            flush=True,
        )
    return 0
