"""Run a model over a ring of nodes. This is the first node: it cuts the model, configures the secondaries, and generates.

examples:
  starter.py --ckpt checkpoints/org/model --nodes-config settings_distr/configuration.json --prompt "Who are you?"
      three samples over the nodes of that file (start secondary.py on the others)
  starter.py --ckpt checkpoints/org/model --nodes-config settings_distr/standalone.json --n-samples 1 --temperature 0
      the same on this machine alone, the most probable text
  starter.py ... --prompt FILE:questions.txt --n-tokens 500 --json
      one sample per paragraph of a file; the result as one JSON object
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mdi.cli.resume import Journaling
    from mdi.config import ClusterConfig
    from mdi.engine.sequence import SamplingParams
    from mdi.metrics import RunMetrics
    from mdi.run.journal import JournalText
    from mdi.run.nodes import NodeSource
    from mdi.run.run import Run
    from mdi.stages.model_family import ModelFamily


def add_arguments(parser: argparse.ArgumentParser, is_resumable: bool = True) -> None:
    """`is_resumable` false: for a ring whose nodes are known and end with this process."""
    from mdi.cli import add_common_flags, default_nodes_config
    from mdi.cli.access import add_access_flags
    from mdi.cli.discover import add_discovery_flags
    from mdi.cli.flags import add_generation_flags, add_model_flags, add_ring_flags
    from mdi.cli.output import add_output_flags
    from mdi.cli.parallel_flags import add_parallel_flags
    from mdi.cli.resume import add_resume_flags

    add_model_flags(parser)
    nodes = parser.add_argument_group("nodes")
    nodes.add_argument(
        "--nodes-config",
        type=Path,
        metavar="FILE",
        help="nodes file (default: the nodes found in the network with the key of --key; without a key "
        f"{default_nodes_config()})",
    )
    add_access_flags(nodes)
    if is_resumable:
        add_discovery_flags(nodes)
    add_ring_flags(nodes)
    nodes.add_argument("--stop-nodes", action="store_true", help="end the secondaries' processes after the run")
    add_parallel_flags(nodes)
    add_generation_flags(parser, n_tokens=300)
    if is_resumable:
        add_resume_flags(parser)
    add_output_flags(parser)
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    from mdi.cli.discover import cluster_of_flags
    from mdi.cli.resume import Journaling, list_runs
    from mdi.cli.session_flags import nodes_of

    if args.resume == "":
        list_runs(args)
        return 0
    with contextlib.ExitStack() as stack:
        journaling = None
        if not args.no_journal:
            journaling = Journaling(args)
            stack.callback(journaling.close)
        generate_on(args, lambda: nodes_of(args, lambda: cluster_of_flags(args)), journaling=journaling)
    return 0


def run_on(
    args: argparse.Namespace, find: Callable[[], ClusterConfig], family: Callable[[], ModelFamily] | None = None
) -> int:
    """One run on nodes that `find` finds, from flags to report; see `generate_on`."""
    from mdi.cli.session_flags import nodes_of

    generate_on(args, lambda: nodes_of(args, find), family)
    return 0


def generate_on(
    args: argparse.Namespace,
    make_nodes: Callable[[], NodeSource],
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
        return generate(args, make_nodes, family, is_reported, journaling)
    except (Exception, KeyboardInterrupt) as e:
        if args.json and not isinstance(e, BrokenPipeError) and not getattr(e, "is_reported", False):
            print_json({"error": str(e) or "interrupted", "samples": []})
        raise


def generate(
    args: argparse.Namespace,
    make_nodes: Callable[[], NodeSource],
    family: Callable[[], ModelFamily] | None,
    is_reported: bool,
    journaling: Journaling | None,
) -> RunMetrics:
    from mdi.cli import ignore_interrupts
    from mdi.cli.checks import check_computing, check_model
    from mdi.cli.output import report
    from mdi.cli.session_flags import sampling_params, starter_options, tell_seed
    from mdi.errors import MdiError
    from mdi.prompts import read_prompts
    from mdi.run.run import Run

    check_computing(args)
    known = None if journaling is None else journaling.texts
    if known is None:
        prompts = read_prompts(args.prompt or [], args.n_samples, default=args.samples_of_one)
    else:
        prompts = [text.prompt for text in known]
    params = sampling_params(args)
    check_model(args, is_litgpt=family is None)
    is_streaming = is_reported and not (args.json or args.no_stream)
    failure: BaseException | None = None
    with make_nodes() as nodes:
        session = Run(
            nodes, starter_options(args), args.n_tokens, prompts if known is None else [text.prompt_ids for text in known],
            family=family, leave=getattr(args, "stop_nodes", False), on_close=ignore_interrupts,
        )  # fmt: skip
        try:
            with session:
                if journaling is not None:
                    journaling.begin(args, session, prompts)
                if is_reported:
                    tell_seed(params)
                _submit(session, prompts, params, args.stop, known, is_streaming)
                session.read()
        except (MdiError, KeyboardInterrupt) as e:
            if not session.was_open:
                raise
            failure = e
        if is_reported or failure is not None:
            report(args, session, failure, is_streaming)
    if failure is not None:
        failure.is_reported = True  # type: ignore[attr-defined]
        raise failure
    return session.metrics()


def _submit(
    session: Run, prompts: list[str], params: SamplingParams, stop: list[str], known: list[JournalText] | None,
    is_streaming: bool,
) -> None:  # fmt: skip
    """All texts of the run, shown as they grow if that is wanted; `known` is what an earlier run has of them."""
    from mdi.run.display import open_stream

    stream = open_stream(len(prompts)) if is_streaming else None
    on_text = (lambda sample, text: stream.show(sample.index, text)) if stream is not None else None
    for i, (prompt, ids) in enumerate(zip(prompts, session.prompt_ids, strict=True)):
        if stream is not None:
            stream.show(i, prompt + ("" if session.model.codec.prompt_style is None else "\n"))
        before, reason = ((), None) if known is None else (known[i].ids, known[i].finish_reason)
        sample = session.submit(prompt, ids, params, stop, on_text, before=before, finish_reason=reason)
        sample.may_differ_from = None if known is None else known[i].may_differ_from
