"""Run a secondary (worker) node: it waits for a starter, computes its blocks, and waits for the next run.

examples:
  mdi secondary --nodes-config nodes.json 0
      the first secondary of that file; the starter sends its weights, which are kept for the next time
  mdi secondary --nodes-config nodes.json 1 --chunk model_secondary1.safetensors
      the second one, with the chunk that mdi prepare-model made and that was copied here
"""

from __future__ import annotations

import contextlib
import os
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from mdi.spec.options import ACCESS, COMMON, NODE, Options, Requested, packed_format
from mdi.spec.parser import Parser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from mdi.checkpoint.weights import WeightSource
    from mdi.net.keys import KeyFile
    from mdi.node.secondary import SecondaryNode
    from mdi.spec.cluster import NodeConfig
    from mdi.stages.model_family import ModelFamily


FIRST = (
    "--nodes-config", "--key", "--chunk", "--ckpt", "--cache-dir", "--device", "--threads", "--memory", "--quantize", "--verb",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    parser.options(None, "place", *ACCESS)
    add_node_options(parser)
    parser.options(None, *COMMON)


def add_node_options(parser: Parser) -> None:
    """Options of a node: what it computes with, and where its weights are."""
    chunk, ckpt = "this node's chunk, made by mdi prepare-model", "the whole checkpoint, if it is on this machine"
    parser.options(None, "chunk", "ckpt", is_one=True, chunk={"help": chunk}, ckpt={"help": ckpt})
    parser.options(
        None, *NODE, "seed", "quiet", "until_stdin_closes",
        dtype={"help": "float32, float16 or bfloat16 (default: the nodes file, else what the starter asks for)"},
        quantize={"help": "weight format, see mdi starter --help (default: what the starter asks for)", "read": packed_format},
        seed={"help": ""},  # once accepted; a secondary draws nothing
    )  # fmt: skip


def run(options: Options) -> int:
    from mdi.spec.cluster import load_nodes, load_secondary

    path, index = place_of(options)
    return serve(options, load_secondary(path, index), nodes=load_nodes(path))


def place_of(options: Options) -> tuple[str, int | None]:
    """File and index of --nodes-config. Raises UsageError."""
    from mdi.cli import default_nodes_config
    from mdi.errors import UsageError

    place = options.place or (str(default_nodes_config()), "0")
    if len(place) > 2:
        raise UsageError(f"--nodes-config takes a file and an index, got {' '.join(place)}")
    index = None
    if len(place) == 2:
        if not place[1].isdigit():
            raise UsageError(f"the index after --nodes-config must be a number from 0 on, got {place[1]!r}")
        index = int(place[1])
    return place[0], index


def serve(
    options: Options,
    config: NodeConfig,
    family: Callable[[], ModelFamily] | None = None,
    nodes: Sequence[NodeConfig] = (),
    during: Callable[[SecondaryNode], AbstractContextManager[object]] = contextlib.nullcontext,
) -> int:
    """Run this node until it is asked to end.

    Args:
        during: entered while it runs.
        family: makes that of the models that it runs; None is litgpt's.
        nodes: of the ring, as far as they are known: some may be on this machine.
    """
    from mdi.cli import ignore_interrupts
    from mdi.cli.access import open_keys, refuse_exposure
    from mdi.cli.discover import reachable
    from mdi.cli.session import found_chunk
    from mdi.run.local import sweep

    keys = open_keys(options)
    refuse_exposure(options, keys, config)
    options = replace(options, chunk=found_chunk(options.chunk))
    node, weights = _made_node(options, config, family, nodes, keys)
    try:
        node.open()
        _hand_over_when_terminated(node)
        if options.until_stdin_closes:
            threading.Thread(target=leave_with_stdin, name="stdin", daemon=True).start()
        with reachable(options, node, keys), _swarm_member(options, node, keys), during(node):
            node.run()
    finally:
        ignore_interrupts()
        node.close()
        if weights is not None:
            weights.close()
        if options.until_stdin_closes:
            sweep()  # of its starter, if that was killed
    return 0


@contextlib.contextmanager
def _swarm_member(options: Options, node: SecondaryNode, keys: KeyFile | None) -> Iterator[None]:
    """Within: the node holds blocks of a model for all runs, if it was started so. Raises what has ended that."""
    if options.stand_with is None:
        yield
        return
    from mdi.checkpoint.source import open_source
    from mdi.cli.access import split_address
    from mdi.cli.discover import neighbours
    from mdi.control.meeting import Peer
    from mdi.node.swarm_member import SwarmMember

    peers = [Peer(*split_address(text, 0)) for text in options.peer]
    with neighbours(options, node.config.addr, keys) as found, contextlib.ExitStack() as stack:
        here = options.ckpt is not None and stack.enter_context(contextlib.closing(open_source(options.ckpt)))
        member = SwarmMember(
            node, here or options.stand_with, peers, keys, options.max_blocks, found, spare_bytes=options.spare_memory
        )
        member.start()
        try:
            yield
            member.check()
        finally:
            member.close()


def _made_node(
    options: Options, config: NodeConfig, family: Callable[[], ModelFamily] | None, nodes: Sequence[NodeConfig],
    keys: KeyFile | None,
) -> tuple[SecondaryNode, WeightSource | None]:  # fmt: skip
    """The node that the flags describe, with the weights on this machine, if any. UsageError, CheckpointError."""
    from mdi.cli.session import found_ckpt, weight_memory
    from mdi.files import default_cache_dir

    path = options.chunk or (found_ckpt(options.ckpt) if options.ckpt is not None else None)
    memory, cores = weight_memory(options), options.cores or config.cores

    from mdi.host.threads import choose_threads, threads_of_others
    from mdi.node.secondary import SecondaryNode
    from mdi.stages.model_family import ModelFamily

    asked = replace(Requested.of(options), threads=options.threads or config.threads or (len(cores) if cores else None))
    choose_threads(options.threads or config.threads, cores, threads_of_others(config, nodes))
    model = ModelFamily() if family is None else family()
    weights = model.open_source(path) if path is not None else None
    cache_dir = options.cache_dir or default_cache_dir()
    node = SecondaryNode(
        config, weights, cache_dir, asked, options.kv_memory, model, options.cache_size, memory, keys,
        prefix_dir=options.prefix_dir,
        spare_bytes=(options.spare_memory or 0) if options.stand_with is None else 0,  # else SwarmMember minds it
    )  # fmt: skip
    return node, weights


def _hand_over_when_terminated(node: SecondaryNode) -> None:
    """SIGTERM: move this node's blocks to other nodes, if they can take them. Otherwise, and if it comes again, end at once."""
    import signal

    before = signal.getsignal(signal.SIGTERM)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if node.may_hand_over:
            threading.Thread(target=node.leave, name="leave", daemon=True).start()
        elif callable(before):
            before(number, frame)

    with contextlib.suppress(ValueError):  # not in the main thread, as in tests
        signal.signal(signal.SIGTERM, on_signal)


def leave_with_stdin() -> None:
    """End this process as by SIGTERM when its stdin is closed."""
    import signal

    # Not by way of sys.stdin: its lock would be held when the interpreter ends, and make that a fatal error.
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
