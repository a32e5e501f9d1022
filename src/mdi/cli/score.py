"""Say how probable a text is for a model: its log probability, perplexity, and bits per byte.

examples:
  mdi score Qwen/Qwen3-0.6B book.txt
  mdi score ~/models/tinyllama.Q4_K_M.gguf book.txt --sequence-length 512 --quantize int8
      in windows of 512 tokens, with weights of 8 bits: the difference to the first is what these cost
  echo "The sky is blue." | mdi score NAME - --tokens
      every token with its log probability
  mdi score NAME book.txt --nodes 3 --json
      over a ring of three processes; with --key, --nodes-config or --swarm over the nodes that you have

The text is cut into windows of --sequence-length tokens, which do not overlap. If the tokenizer says that texts begin with a
token of their own, each window begins with it; else the first token of each window is not scored, because nothing is before it.
Perplexities of models with different tokenizers cannot be compared, bits per byte can.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.cancel import Cancel
from mdi.errors import UsageError
from mdi.spec.combinations import OWN_RING, facts_of, refuse
from mdi.spec.options import ACCESS, COMMON, DISCOVERY, MODEL, PARALLEL, RING, Options
from mdi.spec.parser import Parser
from mdi.terminal import show

if TYPE_CHECKING:
    from mdi.run.nodes import NodeSource
    from mdi.run.run import Run
    from mdi.run.scoring import Score

STDIN = "-"


FIRST = (
    "--text", "--tokens", "--json", "--quantize", "--sequence-length", "--nodes-config", "--key", "--machines", "--verb",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    length = {"help": "tokens of a window (default: the model's context, at most 2048)"}
    parser.options("model", *MODEL, "hf_token", "revision", sequence_length=length)
    parser.options("text", "scored", "text", "tokens", "json")
    own = [name for name in RING if name != "verify"]  # which compares the rows from which tokens are drawn
    parser.options("nodes", "nodes_config", *ACCESS, *DISCOVERY, *own, *PARALLEL, "stop_nodes",
                   nodes={"help": "a ring of N processes on this machine"},
                   nodes_config={"help": "nodes file: score over the ring of these nodes"},
                   stop_nodes={"help": "end the secondaries' processes afterwards"})  # fmt: skip
    parser.options(None, *COMMON)


def run(options: Options, cancel: Cancel) -> int:
    try:
        return _score(options, cancel)
    except (Exception, KeyboardInterrupt) as e:
        if options.json and not isinstance(e, BrokenPipeError):
            from mdi.cli.output import print_json

            print_json({"error": str(e) or "interrupted"})
        raise


def _score(options: Options, cancel: Cancel) -> int:
    from mdi.cli import ignore_interrupts
    from mdi.cli.output import print_json
    from mdi.cli.session import on_processes, run_options, with_model
    from mdi.run.run import Run
    from mdi.run.scoring import N_AT_ONCE, WINDOW, score_text
    from mdi.terminal import reporting

    if options.ckpt is not None and options.model and not options.scored:  # then the only word is the text
        options = replace(options, model="", scored=options.model)
    if options.nodes is not None and options.machines is None:
        refuse({**facts_of(options), OWN_RING: OWN_RING}, OWN_RING)
    text = _text(options)
    options = replace(with_model(options if options.nodes is None else on_processes(options), cancel), draft="none")
    n_most = len(text.encode()) + 2  # tokens: each has a byte, but for the first one of a window
    length = min(options.sequence_length or WINDOW, max(n_most, 2))
    n_texts = min(N_AT_ONCE, -(-n_most // length))
    n_scored = 0

    def tell(n: int) -> None:
        nonlocal n_scored
        n_scored = n

    with ExitStack() as stack:
        nodes = _nodes(options, cancel, stack)
        ring = Run(
            nodes, run_options(options), length, n_texts=n_texts, leave=options.stop_nodes, on_close=ignore_interrupts,
            cancel=cancel,
        )  # fmt: skip
        stack.enter_context(ring)
        begin = time.perf_counter()
        with reporting(lambda: f"{n_scored:,} tokens are scored"):
            found = score_text(ring, text, options.sequence_length, tell)
        result = _result(ring, found, options.tokens, time.perf_counter() - begin)
    if options.json:
        print_json(result)
    else:
        show(_lines(result))
    return 0


def _text(options: Options) -> str:
    """The text that is to be scored. Raises UsageError."""
    if (options.text is None) == (not options.scored):
        raise UsageError("give one text: a file, - for standard input, or --text TEXT (see `mdi score --help`)")
    if options.text is not None:
        name, text = "--text", options.text
    else:
        name = "standard input" if options.scored == STDIN else options.scored
        try:
            data = sys.stdin.buffer.read() if options.scored == STDIN else Path(name).expanduser().read_bytes()
            text = data.decode()
        except OSError as e:
            raise UsageError(
                f"{name}: {e.strerror or e}: give a file of text, - for standard input, or --text"
            ) from None
        except UnicodeDecodeError as e:
            raise UsageError(f"{name}: byte {e.start} is not UTF-8: give a file of text in UTF-8") from None
    if not text:
        raise UsageError(f"{name}: the text is empty, so there is nothing to score")
    return text


def _nodes(options: Options, cancel: Cancel, stack: ExitStack) -> NodeSource:
    """Processes of this machine, the nodes that the flags name, or this process alone. Raises UsageError."""
    from mdi.cli.access import open_keys, with_machines
    from mdi.cli.discover import Discovery
    from mdi.cli.session import check_cut, nodes_of, processes_of
    from mdi.run.local import LocalRing
    from mdi.spec.cluster import standalone

    if options.nodes is not None and options.machines is None:
        check_cut(options, options.nodes)
        return stack.enter_context(processes_of(options, options.nodes, LocalRing, options.cores))
    options = with_machines(options)
    discovery = stack.enter_context(Discovery(options, cancel))
    is_here = options.nodes_config is None and options.nodes is None and open_keys(options) is None
    return stack.enter_context(nodes_of(options, standalone if is_here else discovery.cluster, discovery))


def _result(ring: Run, score: Score, with_tokens: bool, duration_s: float) -> dict[str, Any]:
    """As --json prints it."""
    n_scored, tokens = score.n_tokens, score.tokens
    result = {
        "model": ring.model.weights.model.name, "n_nodes": ring.cluster.n_nodes, "format": ring.model.format,
        "kv_dtype": ring.model.cache_type, "window": max(map(len, score.windows)),
        "n_windows": len(score.windows), "has_bos": score.has_bos, "n_tokens": n_scored, "n_text_tokens": len(tokens),
        "n_bytes": score.n_bytes, "n_text_bytes": sum(len(piece.encode()) for piece in score.pieces),
        "log_probability": score.log_probability, "perplexity": score.perplexity,
        "bits_per_token": score.bits_per_token, "bits_per_byte": score.bits_per_byte,
        "duration_s": duration_s, "tokens_s": n_scored / max(duration_s, 1e-9),
    }  # fmt: skip
    return {**result, "tokens": [token._asdict() for token in tokens]} if with_tokens else result


def _lines(result: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{token['log_probability'] or 0.0:10.4f}  {token['text']!r}" if token["log_probability"] is not None
        else f"{'-':>10}  {token['text']!r}"
        for token in result.get("tokens", ())
    ]  # fmt: skip
    nodes = "1 node" if result["n_nodes"] == 1 else f"{result['n_nodes']} nodes"
    windows = "1 window" if result["n_windows"] == 1 else f"{result['n_windows']} windows"
    lines += [
        f"model           {result['model']} ({result['format']}) on {nodes}",
        f"scored          {result['n_tokens']:,} of {result['n_text_tokens']:,} tokens, {result['n_bytes']:,} bytes, in "
        f"{windows} of {result['window']:,} tokens",
        f"perplexity      {result['perplexity']:.4f}",
        f"bits per byte   {result['bits_per_byte']:.4f}",
        f"bits per token  {result['bits_per_token']:.4f}",
        f"log probability {result['log_probability']:.3f}",
        f"time            {result['duration_s']:.1f} s, {result['tokens_s']:.0f} tokens/s",
    ]
    return "\n".join(lines)
