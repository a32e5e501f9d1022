r"""Adapt a model to examples over a ring whose nodes keep their blocks as they are, packed as for generation.

The ring computes each example once. The outputs of some blocks come back and are kept on the disk of this machine, readable
by you alone. From them a side network learns here, in torch; after the first pass the ring is not needed any more. It is
written to --out, and used with --adapter by starter, run, sample, chat and serve.

examples:
  mdi finetune --ckpt checkpoints/org/model --data texts.jsonl --out mine                     on this machine alone
  mdi finetune --ckpt checkpoints/org/model --nodes 3 --data texts.jsonl --out mine           a ring of three processes here
  mdi finetune --ckpt checkpoints/org/model --nodes-config nodes.json --data texts.jsonl --out mine --resume
      over the nodes of that file; goes on with what was interrupted
  mdi finetune --ckpt checkpoints/org/model --head classes --data mails.jsonl --eval others.jsonl --out spam
  mdi finetune --ckpt checkpoints/org/model --predict new.jsonl --out spam                    prints a label for each text
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.cancel import Cancel
from mdi.errors import EngineError, UsageError
from mdi.spec.options import ACCESS, COMMON, MODEL, TUNING, Options, TuningOptions
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
    from mdi_training.side_training import SideTraining

WORK = "work"  # the folder in --out for what is needed until the end
N_TEXTS = 8  # at the same time in the ring
DEFAULT_SEED = 10137
TEXT_LIMIT = 2048  # tokens of a text without --sequence-length, if the model allows it

logger = logging.getLogger("mdi")


def add_arguments(parser: Parser) -> None:
    parser.options("model", *MODEL)
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
    from mdi.cli.access import with_machines
    from mdi.cli.session import check_cut, on_processes, run_options, with_model
    from mdi.host.device import load_torch

    asked = options.tuning
    if options.out is None or (asked.data is None) == (asked.predict is None):
        raise UsageError("give --out DIR, and --data FILE to learn from, or --predict FILE", code="flags")
    if options.nodes is not None and options.nodes_config is not None:
        raise UsageError(
            "--nodes makes a ring of its own; --nodes-config has one already: give one of them", code="flags"
        )
    if options.quantize == "auto":
        raise UsageError(
            "--quantize auto: say which format, so that an interrupted fine-tuning can go on", code="flags"
        )
    options = replace(options, key=with_machines(options).key)
    options = with_model(options, cancel)
    check_cut(options, 1 if options.nodes is None else options.nodes)
    options = run_options(options if options.nodes is None else on_processes(options))
    load_torch("fine-tuning")
    with ExitStack() as stack:
        model = _Model(options)
        stack.callback(model.close)
        return _predict(options, model, cancel) if asked.data is None else _learn(options, model, cancel)


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
            config = self._family.config(weights.config)
            longest = self._family.max_length(config)
            self.max_length = context_length(config, longest, options.sequence_length)
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

    def head(self) -> FrozenHead:
        """Final norm and head, with the numbers that a run has in its format."""
        from mdi.checkpoint.packing import plain
        from mdi.run.choice import starter_computing
        from mdi_training.frozen_head import FrozenHead

        packing = starter_computing(self._family, self.weights, self._options).packing
        return FrozenHead(self.weights.config, plain(self.weights.source_of("head").weights("head", packing)))

    def close(self) -> None:
        self.codec.close()
        self.weights.close()


# Learning


def _learn(options: Options, model: _Model, cancel: Cancel) -> int:
    from mdi.run.identity import base_of
    from mdi.stages.side import CLASSES, LM, SIDE_FILE, SideShape, write_side
    from mdi_training.examples import class_examples, digest_of, labels_of, lm_examples, read_rows
    from mdi_training.features import FeatureKind, Features
    from mdi_training.interrupt import StopRequest
    from mdi_training.side_training import LOSSES_FILE, SideModule, SideSettings, SideTraining, train

    asked, out = options.tuning, options.out
    assert asked.data is not None and out is not None
    config = model.weights.config
    n_logits = _n_logits(asked, config)
    rows = read_rows(asked.data)
    held_out = [] if asked.held_out is None else read_rows(asked.held_out)
    labels = labels_of(rows) if asked.task == CLASSES else ()
    if asked.task == LM:
        make: Callable[..., list[Example]] = partial(lm_examples, codec=model.codec, max_length=model.max_length)
    else:
        make = partial(class_examples, codec=model.codec, max_length=model.max_length, labels=labels)
    train_examples = make(rows)
    examples = train_examples + (make(held_out) if held_out else [])
    work = out / WORK
    taps = _taps(asked.taps, config["n_layer"])
    width = asked.width or max(1, config["n_embd"] // 8)
    shape = SideShape(base_of(model.weights), config["n_embd"], taps, width, asked.task, labels)
    kind = FeatureKind(digest_of(examples), model.identity, taps, config["n_embd"], asked.feature_bits, n_logits)
    if options.resume is None and ((out / SIDE_FILE).exists() or work.exists()):
        raise UsageError(
            f"{out} has a fine-tuning already: give --resume to go on with it, or another --out", code="exists"
        )
    _say_disk(work, kind, sum(example.n_rows for example in examples))
    seed = DEFAULT_SEED if options.seed is None else options.seed
    settings = SideSettings(asked.epochs, asked.batch_size, asked.lr, seed)
    features = Features(work, kind, examples)
    try:
        ring_s = _compute(options, model, features, examples, cancel)
        head = model.head() if asked.task == LM else None
        training = SideTraining(SideModule(shape, seed), head, features, examples, len(train_examples), settings)
        ring_s += _keep_logits(training, sum(example.n_rows for example in examples))
        held = range(len(train_examples), len(examples)) or range(len(train_examples))
        what = "held out" if held_out else "examples"
        print(f"{what} before: {training.score(held)}", flush=True)
        if training.restore(work):
            print(f"going on after step {training.n_steps} of {training.n_all}", flush=True)
        with StopRequest() as stop:
            is_done = train(training, work, out / LOSSES_FILE, lambda: bool(stop), partial(print, flush=True), ring_s)
        if not is_done:
            print(f"stopped after step {training.n_steps} of {training.n_all}; --resume goes on", flush=True)
            return 128 + (stop.number or 0)
        print(f"{what} after: {training.score(held)}", flush=True)
        path = write_side(out, shape, training.module.tensors())
    finally:
        features.close()
    if not asked.keep_features:
        features.remove()
    how = "--predict FILE uses it" if asked.task == CLASSES else f"--adapter {out} uses it"
    print(f"{path}: {sum(array.size for array in training.module.tensors().values()):,} numbers; {how}", flush=True)
    return 0


def _taps(asked: tuple[int, ...] | int, n_layer: int) -> tuple[int, ...]:
    """The blocks whose outputs are wanted besides those of the last one. Raises UsageError."""
    from mdi.control.messages import MOST_TAPS

    if isinstance(asked, int):
        n = min(asked, n_layer - 1)
        asked = tuple(sorted({(i + 1) * n_layer // (n + 1) - 1 for i in range(n)}))
    if len(asked) > MOST_TAPS or any(tap >= n_layer - 1 for tap in asked):
        raise UsageError(
            f"--taps: at most {MOST_TAPS} blocks below {n_layer - 1}; the outputs of the last one come always",
            code="value",
        )
    return asked


def _n_logits(asked: TuningOptions, config: Mapping[str, Any]) -> int:
    """Logits of a row that are kept on the disk. Raises UsageError."""
    if not asked.keep_logits:
        return 0
    if asked.task != "lm" or config["final_logit_softcapping"] is not None:
        raise UsageError("--keep-logits: only with --head lm, and for models whose logits have no cap", code="flags")
    return int(config["padded_vocab_size"])


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
    take: Callable[[int, int, np.ndarray], None], finish: Callable[[int], None],
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
            request = run.submit_rows(example.ids, example.read_from, partial(give, index), came)
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


def _nodes(options: Options, cancel: Cancel) -> NodeSource:
    from mdi.cli.session import nodes_of, processes_of
    from mdi.node.local import LocalRing
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
    check_base(shape, base_of(model.weights), model.weights.config, options.out)
    if shape.head != CLASSES:
        raise UsageError(f"--predict: {options.out} knows no labels, and writes texts: use --adapter", code="flags")
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
