"""Run a model over a ring of nodes. This is the first node: it cuts the model, configures the secondaries, and generates.

examples:
  mdi starter org/name --nodes-config nodes.json --prompt "Who are you?"
      three samples over the nodes of that file (start mdi secondary on the others)
  mdi starter model.Q4_K_M.gguf --n-samples 1 --temperature 0
      the same on this machine alone, the most probable text
  mdi starter ... --prompt FILE:questions.txt --n-tokens 500 --json
      one sample per paragraph of a file; the result as one JSON object
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from mdi.cancel import Cancel
from mdi.spec.options import ACCESS, COMMON, DISCOVERY, GENERATION, MODEL, OUTPUT, PARALLEL, RESUME, RING, Options
from mdi.spec.parser import Parser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mdi.cli.resume import Journaling
    from mdi.engine.cohort import Beams
    from mdi.engine.sequence import SamplingParams
    from mdi.metrics import RunMetrics
    from mdi.run.journal import JournalText
    from mdi.run.nodes import NodeSource
    from mdi.run.run import Run
    from mdi.run.texts import OnText
    from mdi.spec.cluster import ClusterConfig
    from mdi.stages.model_family import ModelFamily


FIRST = (
    "--ckpt", "--quantize", "--memory", "--nodes-config", "--key", "--placement",
    "--prompt", "--n-samples", "--n-tokens", "--temperature", "--resume", "--plots", "--verb",
)  # fmt: skip


def add_arguments(parser: Parser, is_resumable: bool = True) -> None:
    """`is_resumable` false: for a ring whose nodes are known and end with this process."""
    parser.options("model", *MODEL)
    parser.options(
        "nodes", "nodes_config", *ACCESS, *(DISCOVERY if is_resumable else ()), *RING, "stop_nodes", *PARALLEL
    )
    parser.options("generation", *GENERATION)
    if is_resumable:
        parser.options("going on with a run", *RESUME)
    parser.options("output", *OUTPUT)
    parser.options(None, *COMMON)


def run(options: Options, cancel: Cancel) -> int:
    from mdi.cli.access import with_machines
    from mdi.cli.discover import Discovery
    from mdi.cli.resume import Journaling, list_runs
    from mdi.cli.session import nodes_of

    if options.resume == "":
        list_runs(options)
        return 0
    options = with_machines(options)
    with contextlib.ExitStack() as stack:
        journaling = None
        if not options.no_journal:
            journaling = Journaling(options)
            options = journaling.options
            stack.callback(journaling.close)
        discovery = stack.enter_context(Discovery(options, cancel))
        generate_on(options, lambda: nodes_of(options, discovery.cluster, discovery), cancel, journaling=journaling)
    return 0


def run_on(
    options: Options, find: Callable[[], ClusterConfig], cancel: Cancel,
    family: Callable[[], ModelFamily] | None = None,
) -> int:  # fmt: skip
    """One run on nodes that `find` finds, from flags to report; see `generate_on`."""
    from mdi.cli.discover import Discovery
    from mdi.cli.session import nodes_of

    with Discovery(options, cancel) as discovery:
        generate_on(options, lambda: nodes_of(options, find, discovery), cancel, family)
    return 0


def generate_on(
    options: Options,
    make_nodes: Callable[[], NodeSource],
    cancel: Cancel,
    family: Callable[[], ModelFamily] | None = None,
    is_reported: bool = True,
    journaling: Journaling | None = None,
) -> RunMetrics:
    """One run, from flags to its metrics.

    Args:
        make_nodes: makes the nodes of the run, once the flags have been checked.
        family: makes that of the model; None is litgpt's.
        is_reported: show the texts as they grow, and tables and files at the end.
        journaling: records the progress of the run.
    """
    from mdi.cli.output import print_json

    try:
        return generate(options, make_nodes, cancel, family, is_reported, journaling)
    except (Exception, KeyboardInterrupt) as e:
        if options.json and not isinstance(e, BrokenPipeError) and not getattr(e, "is_reported", False):
            print_json({"error": str(e) or "interrupted", "samples": []})
        raise


def generate(
    options: Options,
    make_nodes: Callable[[], NodeSource],
    cancel: Cancel,
    family: Callable[[], ModelFamily] | None,
    is_reported: bool,
    journaling: Journaling | None,
) -> RunMetrics:
    from mdi.cli import ignore_interrupts
    from mdi.cli.output import report
    from mdi.cli.session import beams_of, run_options, sampling_params, show_seed, with_model, with_seed
    from mdi.errors import MdiError
    from mdi.run.run import Run
    from mdi.spec.prompts import read_prompts

    options = with_seed(options)
    known = None if journaling is None else journaling.texts
    if known is None:
        prompts = read_prompts(options.prompt, options.n_samples, default=options.samples_of_one)
    else:
        prompts = [text.prompt for text in known]
    sampling_params(options)  # wrong ones are refused before anything is loaded
    beams = beams_of(options, prompts)
    if beams is not None:  # texts of one prompt one after the other, the best first
        prompts.sort(key={prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}.__getitem__)
    options = with_model(options, cancel, is_litgpt=family is None)
    is_streaming = is_reported and not (options.json or options.no_stream)
    failure: BaseException | None = None
    with make_nodes() as nodes:
        session = Run(
            nodes, run_options(options), options.n_tokens, prompts if known is None else [text.prompt_ids for text in known],
            n_texts=None if beams is None else beams.n * len(set(prompts)),
            family=family, leave=options.stop_nodes, on_close=ignore_interrupts, cancel=cancel,
        )  # fmt: skip
        try:
            with session:
                if journaling is not None:
                    journaling.begin(options, session, prompts)
                params = sampling_params(options, session.model.codec.drawing)
                if is_reported and beams is None:
                    show_seed(params)
                _submit(session, prompts, params, options.stop, known, is_streaming, beams)
                session.read()
        except (MdiError, KeyboardInterrupt) as e:
            if not session.was_open:
                raise
            failure = e
        if is_reported or failure is not None:
            report(options, session, failure, is_streaming)
    if failure is not None:
        failure.is_reported = True  # type: ignore[attr-defined]
        raise failure
    return session.metrics()


def _submit(
    session: Run, prompts: list[str], params: SamplingParams, stop: Sequence[str], known: list[JournalText] | None,
    is_streaming: bool, beams: Beams | None,
) -> None:  # fmt: skip
    """All texts of the run, shown as they grow if that is wanted; `known` is what an earlier run has of them."""
    from mdi.cli.output import open_stream

    stream = open_stream(len(prompts)) if is_streaming else None
    on_texts: list[OnText | None] = [None] * len(prompts)
    if stream is not None:
        for i, prompt in enumerate(prompts):
            on_texts[i] = partial(stream.show, i)
            stream.show(i, prompt + ("" if session.model.codec.prompt_style is None else "\n"))
    before: list[tuple[Sequence[int], str | None]] = [((), None)] * len(prompts)
    if known is not None:
        before = [(text.ids, text.finish_reason) for text in known]
    adapters = session.adapters or ("",)
    places: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        places.setdefault(prompt if beams is not None else str(i), []).append(i)
    for number, own in enumerate(places.values()):  # of one prompt, if its best texts are searched, else of one text
        first, adapter = own[0], adapters[number % len(adapters)]
        prompt, ids = prompts[first], session.prompt_ids[first]
        if beams is not None:
            shown, reached = [on_texts[i] for i in own], [before[i] for i in own]
            session.submit_beams(prompt, ids, params, beams, stop, shown, reached, adapter)
            continue
        tokens, reason = before[first]
        sample = session.submit(
            prompt, ids, params, stop, on_texts[first], before=tokens, finish_reason=reason, adapter=adapter
        )  # fmt: skip
        sample.may_differ_from = None if known is None else known[first].may_differ_from
