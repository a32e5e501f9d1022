"""From flags to a session: its nodes, how to compute, and how to draw."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mdi.config import ClusterConfig
    from mdi.engine.sequence import SamplingParams
    from mdi.node.local import LocalRing
    from mdi.node.options import StarterOptions
    from mdi.run.nodes import NodeSource

logger = logging.getLogger("mdi")


def nodes_of(args: argparse.Namespace, find: Callable[[], ClusterConfig]) -> NodeSource:
    """Nodes that run already, or this process alone. UsageError if --cores is wrong."""
    from mdi.cli.access import with_keys
    from mdi.cli.checks import check_cut
    from mdi.cli.discover import arrivals
    from mdi.run.nodes import NodeSource

    latest: ClusterConfig | None = None

    def found() -> ClusterConfig:
        nonlocal latest
        latest = with_keys(args, find())
        check_cut(args, latest.n_stages)
        return latest

    return NodeSource(found, args.threads, cores_of(args), arrivals(args, lambda: latest))


def processes_of(
    args: argparse.Namespace, make_ring: type[LocalRing], cores: Sequence[int] | None, n_spares: int = 0,
    told: Callable[[LocalRing], None] = lambda ring: None, is_revived: bool = False,
) -> NodeSource:  # fmt: skip
    """A ring of --nodes processes on this machine.

    Args:
        cores: divided among the nodes; None keeps none on any.
        told: called with a started ring.
        is_revived: see OwnProcesses.
    """
    from mdi.cli.access import KEY_VARIABLE, with_keys
    from mdi.run.nodes import OwnProcesses

    if args.key is not None:
        os.environ[KEY_VARIABLE] = str(args.key.expanduser().absolute())  # for the nodes, too
    if args.placement is None and args.devices is None:
        args.placement = "even"  # the nodes are all alike: measuring them would tell nothing
    kv_memory = parsed_bytes(args, "kv_memory")

    def begun(ring: LocalRing) -> ClusterConfig:
        told(ring)
        return with_keys(args, ring.cluster)

    return OwnProcesses(
        lambda: make_ring(
            args.nodes, args.devices, args.threads, args.ckpt, args.verb, args.debug, cores, kv_memory, n_spares
        ),
        begun, is_revived,
    )  # fmt: skip


def cores_of(args: argparse.Namespace) -> tuple[int, ...] | None:
    """What --cores says; None without. UsageError."""
    from mdi.config import parse_cores

    return None if args.cores is None else parse_cores(args.cores, "--cores")


def parsed_bytes(args: argparse.Namespace, name: str) -> int | None:
    """What a flag like --kv-memory says; None without. UsageError."""
    from mdi.config import parse_bytes

    value = getattr(args, name, None)
    return None if value is None else parse_bytes(value, f"--{name.replace('_', '-')}")


def replay_bytes(args: argparse.Namespace) -> int:
    """What --replay-memory says, or the default. UsageError."""
    from mdi.replay_memory import REPLAY_BYTES

    value = parsed_bytes(args, "replay_memory")
    return REPLAY_BYTES if value is None else value


def chosen_placement(args: argparse.Namespace) -> str | None:
    """The flag, else MDI_PLACEMENT; None is the default. UsageError if the variable names none."""
    from mdi.errors import UsageError
    from mdi.partition.methods import METHODS

    named = os.environ.get("MDI_PLACEMENT") or None
    if named is not None and named not in METHODS:
        raise UsageError(f"MDI_PLACEMENT={named!r}: expected {', '.join(METHODS)}")
    return getattr(args, "placement", None) or named


def starter_options(args: argparse.Namespace) -> StarterOptions:
    """What the flags say of the model and of how to compute. Raises UsageError."""
    from mdi.cache_dir import default_cache_dir
    from mdi.cli.parallel_flags import parallel_options
    from mdi.cli.window_flags import weight_memory
    from mdi.control.messages import N_FRAMES_LIMIT, SILENCE_LIMITS_S
    from mdi.control.requested import Requested
    from mdi.errors import UsageError
    from mdi.net.wire import SILENCE_S
    from mdi.node.options import StarterOptions
    from mdi.tracing.recorder import N_SPANS

    wait_s = getattr(args, "wait", 30.0)
    if not 0 <= wait_s < float("inf"):
        raise UsageError(f"--wait must be 0 seconds or more, got {wait_s}")
    if args.sequence_length is not None and args.sequence_length < 1:
        raise UsageError(f"--sequence-length must be at least 1, got {args.sequence_length}")
    silence_s = getattr(args, "silence_s", SILENCE_S)
    low, high = SILENCE_LIMITS_S
    if not low <= silence_s <= high:
        raise UsageError(f"--silence-s must be from {low:g} to {high:g} seconds, got {silence_s:g}")
    n_frames = getattr(args, "frames", None)
    if n_frames is not None and not 1 <= n_frames <= N_FRAMES_LIMIT:
        raise UsageError(f"--frames must be from 1 to {N_FRAMES_LIMIT}, got {n_frames}")
    return StarterOptions(
        ckpt=args.ckpt,
        chunk=getattr(args, "chunk", None),
        layers=getattr(args, "layers", None),
        placement=chosen_placement(args),
        prefer_memory=getattr(args, "prefer_memory", None),
        cache_dir=default_cache_dir(),
        sequence_length=args.sequence_length,
        prompt_style=args.prompt_style,
        wait_s=wait_s,
        weight_memory=weight_memory(args),
        kv_memory=parsed_bytes(args, "kv_memory"),
        n_frames=n_frames,
        parallel=parallel_options(args),
        fixed=getattr(args, "fixed", True),
        silence_s=silence_s,
        replay_memory=replay_bytes(args),
        n_spans=N_SPANS if getattr(args, "trace", None) is not None else 0,
        **vars(replace(Requested.of(args), quantize_head=args.quantize_head or args.quantize)),
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the flags say of the draws; without --seed a new one, which is written to `args`. UsageError."""
    from mdi.engine.sequence import SamplingParams
    from mdi.errors import UsageError

    if args.top_k < 0:
        raise UsageError(f"--top-k must be 0 (all tokens) or more, got {args.top_k}")
    if args.seed is None:
        args.seed = secrets.randbelow(10**9)
    if any(not stop for stop in args.stop):
        raise UsageError("--stop: an empty text would end every sample at once")
    return SamplingParams(
        n_tokens=args.n_tokens, temperature=args.temperature, top_k=args.top_k or None, top_p=args.top_p, seed=args.seed
    )


def tell_seed(params: SamplingParams) -> None:
    """Where something is drawn: how to have the same again."""
    if params.temperature > 0:
        logger.info("seed %d: --seed %d gives the same texts again", params.seed, params.seed)
