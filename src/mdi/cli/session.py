"""From a command's options to a session: checks, nodes, how to compute, and how to draw."""

from __future__ import annotations

import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.cancel import Cancel
from mdi.errors import Code, DownloadError, UsageError
from mdi.spec.combinations import MODEL, facts_of, refuse
from mdi.spec.options import Options
from mdi.text.drawing import OWN

if TYPE_CHECKING:
    from mdi.checkpoint.model_store import ModelStore, StoredModel
    from mdi.cli.discover import Discovery
    from mdi.engine.cohort import Beams, EarlyStopping
    from mdi.engine.sequence import SamplingParams
    from mdi.run.local import LocalRing
    from mdi.run.nodes import NodeSource
    from mdi.spec.cluster import ClusterConfig
    from mdi.spec.options import WeightMemory
    from mdi.spec.window import WindowOptions

SWARM_CACHE_SHARE = 0.5  # of each node's free memory, for one starter's caches: others come, too

CONTEXT_LIMIT = 8192  # without --sequence-length: enough for a long chat, little enough for position tables

logger = logging.getLogger("mdi")


# Checks of what is typed, before anything heavy is imported


def with_model(options: Options, cancel: Cancel, is_litgpt: bool = True) -> Options:
    """The options with the folder that --ckpt means.

    Args:
        cancel: ends the wait for a download.
        is_litgpt: whether the checkpoint must be a LitGPT one.

    Raises:
        UsageError: a named file does not exist, or there is no model.
    """
    from mdi.checkpoint.folder import check_folder

    options = replace(options, chunk=found_chunk(options.chunk, options.ckpt_folder))
    if options.model:
        refuse({**facts_of(options), MODEL: options.model}, MODEL)
    if options.chunk is not None and options.ckpt is None and not options.model:
        return options
    folder = _named_model(options, cancel) if options.ckpt is None else found_ckpt(options.ckpt, options.ckpt_folder)
    if is_litgpt and options.chunk is None:
        check_folder(folder)
    return replace(options, ckpt=folder, model="")


def is_here(name: str, folder: Path | None) -> bool:
    """Whether a model that is named can be used without fetching it."""
    from mdi.checkpoint.model_store import EMBEDDED, ModelStore, embedded_model

    is_embedded = name == EMBEDDED and embedded_model() is not None
    return is_embedded or Path(name).expanduser().exists() or ModelStore(folder).find(name) is not None


def _named_model(options: Options, cancel: Cancel) -> Path:
    """The folder of the model that is named, fetched if it is not here; without a name, of the last one. Raises MdiError."""
    from mdi.checkpoint.model_store import ModelStore

    store = ModelStore(options.ckpt_folder)
    name = options.model or store.last()
    if name is None:
        raise UsageError(f"give the model: NAME (or --ckpt DIR, or --chunk FILE); {store.describe()}")
    if not options.model:
        logger.info("the model is %s, the last one that was used", name)
    if (here := model_here(name, options.ckpt_folder)) is not None:
        folder, name = here
    elif is_hub_name(name):
        try:
            logger.info("%s is not here; asking the hub for it (it goes to %s)", name, store.folder)
            folder = store.fetch(name, options.hf_token, options.revision, say=logger.info, cancel=cancel)
        except DownloadError as e:
            more = {
                Code.UNKNOWN: store.describe_missing(name),
                Code.CONNECTION: store.describe(),
                Code.OFFLINE: store.describe(),
            }
            if e.code not in more:
                raise
            raise DownloadError(f"{e}; {more[e.code]}", code=e.code) from None
    else:
        raise UsageError(store.describe_missing(name))
    store.remember(name)
    return folder


def model_here(name: str, home: Path | None) -> tuple[Path, str] | None:
    """The folder and the whole name of a model that needs not be fetched: a path, one of the store, or the embedded one.

    Args:
        home: the store; None: the default one.
    """
    from mdi.checkpoint.model_store import EMBEDDED, ModelStore, embedded_model

    store, path = ModelStore(home), Path(name).expanduser()
    if path.exists():
        return found_ckpt(path, home), str(path.absolute())
    if (model := store.find(name)) is not None:
        return store.folder_of(model), model.name
    embedded = embedded_model() if name == EMBEDDED else None
    return None if embedded is None else (embedded, name)


def is_hub_name(name: str) -> bool:
    """Whether this may be a model on the hub, and no file that is not there."""
    from mdi.checkpoint.model_store import is_model_name

    return is_model_name(name) and Path(name).suffix != ".gguf"


def check_cut(options: Options, n_nodes: int) -> None:
    """--layers and the model (after `with_model`) for so many nodes. Raises UsageError if the model cannot be cut so."""
    from mdi.block_ranges import check_n_nodes, parse_layers
    from mdi.checkpoint.folder import stated_blocks

    n_blocks = None if options.ckpt is None else stated_blocks(options.ckpt)
    if options.parallel.mode == "tensor" or n_blocks is None:
        return
    if options.layers is not None:
        parse_layers(options.layers, n_blocks, n_nodes)
    else:
        check_n_nodes(n_blocks, n_nodes)


def found_ckpt(name: Path, home: Path | None = None) -> Path:
    """The folder that --ckpt means: a path, a name in the store, or that of a GGUF file. Raises UsageError.

    Args:
        home: the store; None: the default one.
    """
    from mdi.checkpoint.folder import find_folder
    from mdi.checkpoint.ggufsource import gguf_directory
    from mdi.checkpoint.model_store import ModelStore

    store, given = ModelStore(home), name.expanduser()
    if given.suffix == ".gguf" and not given.is_dir():
        return gguf_directory(given, store.folder)
    here = None if given.exists() else model_here(name.as_posix(), home)
    if here is None and (model := stored_for(given, store)) is not None:
        logger.info("--ckpt %s is not there; taking %s, which is in %s", name, model.name, model.home)
        return store.folder_of(model)
    return find_folder(name, store.folder) if here is None else here[0]


def stored_for(path: Path, store: ModelStore) -> StoredModel | None:
    """The model that a path named when models were in checkpoints/ of a clone: by its last two parts."""
    if path.exists() or len(path.parts) < 3 or path.parts[-3] != "checkpoints":
        return None
    return store.find("/".join(path.parts[-2:]))


def found_chunk(chunk: Path | None, home: Path | None = None) -> Path | None:
    """The file that --chunk means; the name that chunks had before, with .pth, will do. Raises UsageError if there is none.

    Args:
        home: the store of models; None: the default one.
    """
    from mdi.checkpoint.model_store import ModelStore
    from mdi.spec.cluster import nearest_existing

    if chunk is None or chunk.is_file() or chunk.with_suffix(".safetensors").is_file():
        return chunk
    if len(chunk.parts) > 3 and (model := stored_for(chunk.parents[2], store := ModelStore(home))) is not None:
        logger.info("--chunk %s is not there; taking that of %s, which is in %s", chunk, model.name, model.home)
        return found_chunk(store.folder_of(model).joinpath(*chunk.parts[-3:]), home)
    if chunk.is_dir():
        raise UsageError(f"--chunk {chunk} is a directory; a checkpoint is given with --ckpt")
    raise UsageError(f"--chunk {chunk}: no such file (the nearest that exists is {nearest_existing(chunk)})")


# Nodes


def nodes_of(options: Options, find: Callable[[], ClusterConfig], discovery: Discovery | None = None) -> NodeSource:
    """Nodes that run already, or this process alone; `discovery` finds those that come during a run."""
    from mdi.cli.access import with_keys
    from mdi.run.nodes import NodeSource

    if options.swarm is not None and discovery is not None:
        return _swarm_nodes(options, discovery)
    latest: ClusterConfig | None = None

    def found() -> ClusterConfig:
        nonlocal latest
        latest = with_keys(options, find())
        check_cut(options, latest.n_stages)
        return latest

    return NodeSource(
        found, options.threads, options.cores, None if discovery is None else discovery.arrivals(lambda: latest)
    )


def _swarm_nodes(options: Options, discovery: Discovery) -> NodeSource:
    """The nodes of a swarm. Raises UsageError."""
    from mdi.cli.access import free_port, open_keys, own_address, refuse_exposure, split_address
    from mdi.cli.discover import CONTROL_PORT, RING_PORT, neighbours
    from mdi.control.meeting import Peer
    from mdi.run.nodes import SwarmNodes
    from mdi.run.swarm import Swarm
    from mdi.spec.cluster import NodeConfig

    assert options.swarm is not None
    keys = open_keys(options)
    peers = (
        [Peer(*split_address(one.strip(), CONTROL_PORT)) for one in options.swarm.split(",")] if options.swarm else []
    )
    if keys is None and not peers:
        raise UsageError("--swarm finds nodes by their key: give it with --key FILE, or the address of one node")
    addr = options.addr or own_address(peers[0].addr if peers else None)

    def starter() -> NodeConfig:
        ports = (0, 0)  # any, on loopback, where several starters may begin together
        if not addr.startswith("127."):
            ports = free_port(addr, CONTROL_PORT), free_port(addr, RING_PORT)
        config = NodeConfig("starter", addr, *ports)
        refuse_exposure(options, keys, config)
        return config

    with ExitStack() as stack:
        found = stack.enter_context(neighbours(options, addr, keys))
        swarm = Swarm(peers, keys, options.wait_s, found)
        return SwarmNodes(swarm, starter, discovery.cancel, options.threads, options.cores, stack.pop_all().close)


def on_processes(options: Options) -> Options:
    """The options for nodes that are processes of this machine: all alike, so measuring them would say nothing."""
    is_even = options.placement is None and options.devices is None
    return replace(options, placement="even") if is_even else options


def processes_of(
    options: Options, n_nodes: int, make_ring: type[LocalRing], cores: Sequence[int] | None,
    on_begin: Callable[[LocalRing], None] = lambda ring: None, is_revived: bool = False,
) -> NodeSource:  # fmt: skip
    """A ring of processes on this machine.

    Args:
        cores: divided among the nodes; None keeps none on any.
        on_begin: called with a started ring.
        is_revived: see OwnProcesses.
    """
    from mdi.cli.access import with_keys
    from mdi.run.nodes import OwnProcesses

    def begun(ring: LocalRing) -> ClusterConfig:
        on_begin(ring)
        return with_keys(options, ring.cluster)

    return OwnProcesses(
        lambda: make_ring(
            n_nodes, options.devices, options.threads, options.ckpt, options.verb, options.debug, cores, options.kv_memory,
            options.spares, None if options.key is None else options.key.expanduser().absolute(),
        ),
        begun, is_revived,
    )  # fmt: skip


# How to compute and to draw


def asked_window(options: Options) -> WindowOptions | None:
    """The window of --window, --retain and --memory; None without."""
    from mdi.spec.window import window_options

    return window_options(options.window, options.retain, options.memory)


def weight_memory(options: Options) -> WeightMemory:
    """Where weights are read from while computing, by the flags. Raises UsageError."""
    from mdi.spec.options import WeightMemory
    from mdi.spec.window import WindowMemory

    window = asked_window(options)
    return WeightMemory.of(options) if window is None else WindowMemory(window=window)


def chosen_placement(flag: str | None) -> str | None:
    """The flag, else MDI_PLACEMENT; None is the default. UsageError if the variable names none."""
    from mdi.spec.options import PLACEMENTS

    named = os.environ.get("MDI_PLACEMENT") or None
    if named is not None and named not in PLACEMENTS:
        raise UsageError(f"MDI_PLACEMENT={named!r}: expected {', '.join(PLACEMENTS)}")
    return flag or named


def run_options(options: Options) -> Options:
    """The options of a starter, completed by what follows from flags and environment. Raises UsageError."""
    from mdi.engine.recorder import N_SPANS
    from mdi.files import default_cache_dir

    return replace(
        options, placement=chosen_placement(options.placement), cache_dir=default_cache_dir(),
        weight_memory=weight_memory(options), n_spans=0 if options.trace is None else N_SPANS,
        quantize_head=options.quantize_head or options.quantize,
        cache_share=options.cache_share if options.swarm is None else SWARM_CACHE_SHARE,
        draft=options.draft if options.draft in ("auto", "none") else str(found_ckpt(Path(options.draft))),
    )  # fmt: skip


def with_seed(options: Options) -> Options:
    """The options with a seed: a new one without --seed."""
    return options if options.seed is not None else replace(options, seed=secrets.randbelow(10**9))


def sampling_params(options: Options, drawing: Mapping[str, float] = OWN) -> SamplingParams:
    """How tokens are drawn, by options with a seed. Raises UsageError.

    Args:
        drawing: of the model (TextCodec.drawing), for what the options leave out.
    """
    from mdi.engine.sequence import SamplingParams

    assert options.seed is not None
    if not all(options.stop):
        raise UsageError("--stop: an empty text would end every sample at once")
    named = {field.name for field in fields(SamplingParams)}.intersection(field.name for field in fields(options))
    stated = {name: value for name in named if (value := getattr(options, name)) is not None}
    values: dict[str, Any] = {**drawing, **stated}
    return SamplingParams(**{**values, "top_k": values["top_k"] or None})


def beams_of(options: Options, prompts: Sequence[str]) -> Beams | None:
    """How the best texts are searched; None: tokens are drawn. Raises UsageError."""
    from mdi.engine.cohort import Beams

    if options.beams is None:
        return None
    kinds: dict[str, EarlyStopping] = {"true": True, "false": False, "never": "never"}
    beams = Beams(options.beams, options.length_penalty, kinds[options.early_stopping])
    if (n := max(Counter(prompts).values(), default=0)) > beams.n:
        raise UsageError(f"--beams {beams.n}: fewer than the {n} texts of a prompt that are wanted (--n-samples)")
    return beams


def show_seed(params: SamplingParams) -> None:
    """Where something is drawn: how to have the same again."""
    if params.temperature > 0:
        logger.info("seed %d: --seed %d gives the same texts again", params.seed, params.seed)
