"""The options of all commands, each declared once: its type, range, default and help.

A run needs some of them (`StarterOptions`), a node's part in it fewer (`Requested`, which travel to the nodes). The parsers
(mdi.spec.parser), the flags that a command has, requests between nodes (mdi.control.messages) and the tables of
docs/configuration.md are made of these fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from mdi.errors import UsageError
from mdi.kernels.weight_formats import AUTO, MIXTURES, OWN, check_made, is_tied
from mdi.model.caches import CACHE_TYPES, cache_type_named
from mdi.net.wire import REDUCE_DTYPES, SILENCE_S, WIRE_DTYPES
from mdi.spec.cluster import check_device, check_dtype, parse_bytes, parse_cores
from mdi.spec.combinations import COMPARED, facts_of, refuse
from mdi.spec.decode import FormatText, Meta, Text, one_of
from mdi.spec.limits import REPLAY_BYTES
from mdi.spec.parser import Declared, Option, made
from mdi.spec.prompts import DEFAULT_N_SAMPLES, DEFAULT_PROMPT

WEIGHT_MODES = ("auto", "map", "copy")
KV_DTYPES = ("auto", *CACHE_TYPES)
N_THREADS_LIMIT = 4096
N_FRAMES_LIMIT = 4096
SILENCE_LIMITS_S = (0.5, 600.0)
MODES = ("ring", "tensor", "auto")
AIMS = ("tokens", "clients")
PLACEMENTS = ("throughput", "latency", "even")
POOLINGS = ("mean", "last")
DEFAULT_PLACEMENT = "throughput"
DEFAULT_DRAFT = "auto"
# Of fine-tuning.
SIDE, LORA, PROMPT, DEEP_PROMPT, PREFIX = METHODS = ("side", "lora", "prompt", "deep-prompt", "prefix")
ADAPTED = ("query", "key", "value", "projection", "mlp")  # matrices that LoRA can adapt over a ring
SUMS = ("star", "exchange", "ring", "tree")
# Costs less than a star, by the model at any delay and rate, and adds in the order of ranks.
DEFAULT_SUM = "exchange"
SUM_CHOICES = ("auto", *SUMS)
UNITS_LIMIT = 4096
# Names of mdi.text.answers.forms.
TOOL_PARSERS = (
    "deepseek", "gemma4", "glm", "harmony", "hermes", "kimi_k2", "llama3", "minimax_m2", "mistral", "mistral_list",
    "qwen3_coder",
)  # fmt: skip

Threads = Annotated[int, Meta(ge=1, le=N_THREADS_LIMIT)]
Frames = Annotated[int, Meta(ge=1, le=N_FRAMES_LIMIT)]
Silence = Annotated[float, Meta(ge=SILENCE_LIMITS_S[0], le=SILENCE_LIMITS_S[1])]
Length = Annotated[int, Meta(ge=1, le=1 << 30)]
Count = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0)]
Units = Annotated[int, Meta(ge=1, le=UNITS_LIMIT)]


def _device(text: str, flag: str) -> str:
    check_device(text)
    return text


def _dtype(text: str, flag: str) -> str:
    check_dtype(text)
    return text


def _format(text: str, flag: str) -> str:
    return text if text == AUTO else own_or_packed(text, flag)


def own_or_packed(text: str, flag: str) -> str:
    """A weight format, or that of the file."""
    if text != OWN:
        _check_given(text, flag)
    return text


def packed_format(text: str, flag: str) -> str:
    """A weight format of one node, which does not choose for all."""
    if text in MIXTURES:
        raise UsageError(
            f"{flag} {text}: the starter packs a model in {text}, and nodes get its parts so: give it there"
        )
    _check_given(text, flag)
    return text


def planned_format(text: str, flag: str) -> str:
    """A weight format of a whole model."""
    _check_given(text, flag)
    return text


def _check_given(text: str, flag: str) -> None:
    """Raises UsageError if nobody may ask for this format."""
    check_made(text)
    if is_tied(text):
        raise UsageError(f"{flag} {text}: whether an embedding is the head's weight follows from the model")


def _shares(text: str, flag: str) -> tuple[float, ...]:
    try:
        parts = tuple(float(part) for part in text.split(","))
    except ValueError:
        parts = ()
    if not parts or not all(0 <= part < float("inf") for part in parts) or not sum(parts):
        raise UsageError(f"{flag} {text}: expected a number for each node, like 3,2,2")
    return parts


def _per_client(text: str, flag: str) -> tuple[int, float]:
    length, _, tokens_s = text.partition(":")
    try:
        found = int(length), float(tokens_s)
    except ValueError:
        found = 0, 0.0
    if not (1 <= found[0] <= 1 << 30 and 0 < found[1] < float("inf")):
        raise UsageError(f"{flag} {text}: expected the tokens of a text and its tokens/s, like 4096:2")
    return found


def _names(text: str, flag: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or (len(set(names)) < len(names)):
        raise UsageError(f"{flag} {text}: expected names of nodes, each once, like secondary0,secondary2")
    return names


# fmt: off
@dataclass(frozen=True, kw_only=True)
class Requested:
    """One value everywhere: from flags of the same names to the starter's options, requests, and a node's own choices.

    None and "auto" leave the choice to the node. What has been decided is a `host.computing.Computing`.

    Attributes:
        n_spans: how much every node records of what it does (engine.recorder); 0 is nothing.
        cache_share: the part of each node's free memory that caches may take.
    """

    device: Annotated[Text | None, Option(
        "cpu, cuda, cuda:<n> or mps (default: the nodes file, else a GPU if there is one)", read=_device
    )] = None
    dtype: Annotated[Text | None, Option(
        "float32, float16 or bfloat16 (default: on a CPU the fastest that keeps the checkpoint's precision)", read=_dtype
    )] = None
    threads: Annotated[Threads | None, Option(
        "CPU threads to compute with (default: the nodes file, else this node's share of the cores)"
    )] = None
    quantize: Annotated[FormatText | None, Option(
        "format of the blocks' weights: float32, bf16, fp16, int8, q6_k, q4_k, int4 or mxfp4 (on NVIDIA GPUs int8, int4 and "
        "mxfp4 only); smaller is faster; q4_k, a mixture of 4 to 8 bits, keeps texts better than int4, which raised the "
        "perplexity of two real models by 37 and 64 %%, q4_k that of the first by 3 %%; own: a GGUF file at its own bits; "
        "auto, the default of run, chat and serve: own, or int8 for numbers of 16 bits, and smaller if that does not fit. A "
        "secondary may choose its own (default: as the chunks are stored, else the checkpoint's numbers)",
        metavar="FORMAT", read=_format,
        brief="format of the weights: float32, bf16, fp16, int8, q6_k, q4_k, int4 or mxfp4; smaller is faster, and less exact; "
        "own: a GGUF file's own bits; auto, the default of run, chat and serve: own or int8, smaller if that does not fit",
    )] = None
    quantize_head: Annotated[FormatText | None, Option(
        "the same for head and embedding (default: as --quantize)", metavar="FORMAT", read=_format
    )] = None
    wire_dtype: Annotated[Annotated[str, one_of(WIRE_DTYPES)], Option(
        "number format of rows on the links: auto (as computed), fp16, or int8 with a scale per 64 values (%(default)s)",
        choices=WIRE_DTYPES,
    )] = "auto"
    compile: Annotated[bool, Option("compile the blocks' MLPs (needs a C++ compiler)", ("-c", "--compile"))] = False
    allow_clipping: Annotated[bool, Option(
        "let weights that are too large for their format become the largest number that it holds (default: they are refused)"
    )] = False

    mlock: Annotated[bool, Option(
        "lock the weights in memory, so that they are never swapped out; a starter's flag is for all nodes"
    )] = False
    silence_s: Annotated[Silence, Option(
        "a node that is silent for S seconds is lost (%(default)g)", metavar="S"
    )] = SILENCE_S
    keep_prefixes: Annotated[int, Meta(ge=0, le=1 << 50), Option(
        "have each node keep the caches of ended texts on its disk, sealed, in so much at most: a text that begins like one "
        "of them goes on behind it, also after a restart (default: none, as texts would be on disks)", metavar="SIZE",
        read=parse_bytes, default=None,
    )] = 0
    n_spans: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    cache_share: Annotated[float, Meta(gt=0, le=1)] = 1.0

    @staticmethod
    def of(source: Any) -> Requested:
        """Made of an object's attributes of these names: options, a request."""
        found: dict[str, Any] = {f.name: getattr(source, f.name, f.default) for f in fields(Requested)}
        return Requested(**found)

    def over(self, other: Requested) -> Requested:
        """These choices, completed by those of `other`."""
        chosen = {name: value for name, value in vars(Requested.of(self)).items() if value != getattr(ANYTHING, name)}
        return replace(Requested.of(other), **chosen)


ANYTHING = Requested()


@dataclass(frozen=True)
class ParallelOptions:
    """How several nodes compute one model.

    Attributes:
        parts: of each node, what its share is proportional to; None: equal shares, or what nodes measure of themselves.
        algorithm, reduce_dtype: see tensor.sums.
    """

    mode: Annotated[str, Option(
        "ring: each node has some blocks, for many texts; tensor: all nodes compute a share of every block, for few texts; "
        "auto: the fastest by measurement, also a ring of groups of near nodes (%(default)s)", ("--parallel",), choices=MODES,
    )] = "ring"
    parts: Annotated[tuple[float, ...] | None, Option(
        "with --parallel tensor: how much of every block each node takes, starter first, like 3,2,2 (default: as the nodes "
        "measure themselves; equal with --placement even)", ("--shares",), metavar="X,X,...", read=_shares,
    )] = None
    algorithm: Annotated[str, Option(
        "... how the nodes sum their results (%(default)s: exchange)", ("--reduce",), choices=SUM_CHOICES,
    )] = "auto"
    reduce_dtype: Annotated[str, Option(
        "... number format of partial sums on the links (%(default)s)", choices=REDUCE_DTYPES
    )] = "float32"
    is_head_shared: Annotated[bool, Option(
        "... the starter computes all logits, or each node a share of them (%(default)s)", ("--head",), default="starter",
        choices=("starter", "shared"), read=lambda text, _: text == "shared",
    )] = False


SIDE_FILE = "side.safetensors"  # in the folder of a side network


def is_side(adapter: str) -> bool:
    """Whether NAME=DIR has a side network, and no adapter in PEFT's form."""
    folder = Path(adapter.partition("=")[2]).expanduser()
    return (folder / SIDE_FILE).is_file() and not (folder / "adapter_config.json").is_file()


def _with_name(adapter: str) -> str:
    folder = Path(adapter).expanduser()
    is_in_peft_form = "=" not in adapter and (folder / "adapter_config.json").is_file()
    return f"{folder.resolve().name}={adapter}" if is_in_peft_form else adapter


@dataclass(frozen=True)
class WeightMemory:
    """How a node reads weights in files.

    Attributes:
        mode: "map" reads the file's pages, which nodes of one machine share; "copy" takes memory of its own; "auto" copies only
            where mapped pages are read a tenth slower.
    """

    mode: str = "auto"

    @staticmethod
    def of(options: Options) -> WeightMemory:
        return WeightMemory(options.weights)


@dataclass(frozen=True)
class StarterOptions(Requested):
    """The user's choices for a starter.

    Attributes:
        placement: None is the default one, unless chunks that lie there have been cut already.
        cache_dir: where this node keeps what it measured of itself.
        weight_memory: how the starter's own weights are read.
        prefix_owners: whose texts are kept on disks, each with the digest of a key; () is everybody's together.
        prefix_realm: which list that is.
    """

    ckpt: Annotated[Path | None, Option(
        "the model as a flag: a folder, its name in the store, or a GGUF file; nothing is fetched", metavar="DIR"
    )] = None
    chunk: Annotated[Path | None, Option(
        "the starter's chunk; those of the other nodes must lie beside it", metavar="FILE"
    )] = None
    layers: Annotated[str | None, Option("blocks per node, starter first (default: see --placement)", metavar="N,N,...")] = None
    placement: Annotated[str | None, Option(
        "how many blocks each node gets. throughput: most tokens/s, as the nodes measure themselves; latency: the shortest "
        "way of one token; even: equal numbers, nothing is measured "
        "(default: MDI_PLACEMENT, else the cut of existing chunks, else throughput)", choices=PLACEMENTS,
    )] = None
    cache_dir: Annotated[Path | None, Option(
        "folder for weights that a starter sent (default: MDI_CACHE_DIR, else mdi-llm in the user's cache folder)",
        metavar="DIR",
    )] = None
    prefix_dir: Annotated[Path | None, Option(
        "folder for what a server has its nodes keep of ended texts (default: --cache-dir)", metavar="DIR"
    )] = None
    kv_dtype: Annotated[Annotated[str, one_of(KV_DTYPES)], Option(
        "number type of the key/value caches on all nodes (%(default)s: as computed); bf16 and fp16 take half of float32, "
        "int8 a quarter (kernels only)", choices=KV_DTYPES, convert=cache_type_named,
    )] = "auto"
    sequence_length: Annotated[Length | None, Option(
        "most tokens of a sequence, with its prompt (default: the model's context)",
        ("--sequence-length", "--context-length", "--block-size"), metavar="N",
    )] = None
    prompt_style: Annotated[str, Option(
        "how a prompt is wrapped for the model (%(default)s: as the checkpoint says)", metavar="auto|none|NAME"
    )] = "auto"
    wait_s: Annotated[Seconds, Option(
        "how long to wait for secondaries to answer (%(default)s)", ("--wait",), metavar="SECONDS"
    )] = 30.0
    weight_memory: WeightMemory = WeightMemory()
    kv_memory: Annotated[int | None, Option(
        "memory for this node's caches, like 2G or 500M; texts that do not fit wait (default: the nodes file, else what is "
        "free)", metavar="SIZE", read=parse_bytes,
    )] = None
    n_frames: Annotated[Frames | None, Option(
        "frames in flight (default: as many as nodes; one more if measured links are slow compared with computing)",
        ("--frames",), metavar="N",
    )] = None
    fixed: Annotated[bool, Option(
        "end the run when a node is lost (default: other nodes take its blocks, and the texts go on)"
    )] = False
    parallel: ParallelOptions = ParallelOptions()
    replay_memory: Annotated[int, Option(
        "memory of each node for rows that it has sent, so that after a loss only the lost blocks compute them again "
        "(default: 64M; 0 keeps none)", metavar="SIZE", read=parse_bytes, default=None,
    )] = REPLAY_BYTES
    verify: Annotated[Share, Option(
        "have this share of the other nodes' rows computed again, by one that has the blocks or here, bit by bit the same; a "
        "node that differs takes no further part, and its texts are computed again (%(default)g: none; 1: all)", metavar="RATE",
    )] = 0.0
    hot_spare: Annotated[tuple[str, ...], Option(
        "have a spare compute the rows of NODE as well, so that it takes its place at once; auto: of the node with the most "
        "blocks. Each name needs a spare (default: none)", metavar="auto|NODE,...", read=_names,
    )] = ()
    draft: Annotated[str, Option(
        "guess the next tokens while the last one goes round; texts stay the same. auto: from repetitions in the text, from "
        "predicted texts and schemas; DIR: also by a small model with the same tokenizer, on the starter (%(default)s)",
        metavar="auto|none|DIR",
    )] = DEFAULT_DRAFT
    adapter: Annotated[tuple[str, ...], Option(
        "use what `mdi finetune` learned for the model, or an adapter in PEFT's form. Repeatable: texts take all in turn, "
        "and `serve` has the model also as NAME (default: the folder's; a side network without a name is for all texts)",
        metavar="[NAME=]DIR", nargs="append",
    )] = ()
    prefix_owners: tuple[tuple[str, str], ...] = ()
    prefix_realm: str = ""
    draft_inexact: Annotated[bool, Option(
        "guess also where nodes compute in torch, whose rows may differ in their last bits in other company"
    )] = False

    @property
    def named_adapters(self) -> tuple[str, ...]:
        """Adapters that texts choose by name, as NAME=DIR. A folder in PEFT's form without a name has its own name."""
        return tuple(one for one in map(_with_name, self.adapter) if "=" in one)

    @property
    def in_peft_form(self) -> tuple[str, ...]:
        """Adapters in PEFT's form."""
        return tuple(one for one in self.named_adapters if not is_side(one))

    @property
    def sides(self) -> dict[str, Path]:
        """Folders of side networks by their names; "": of all texts. Raises UsageError if that one is not alone."""
        if len(self.named_adapters) == len(self.adapter):
            named = (one.partition("=") for one in self.named_adapters if is_side(one))
            return {name: Path(folder).expanduser() for name, _, folder in named}
        if len(self.adapter) > 1:
            given = " and ".join(self.adapter)
            raise UsageError(f"--adapter: {given} cannot be used together without names: give NAME=DIR")
        return {"": Path(self.adapter[0]).expanduser()}

    @property
    def guesses(self) -> bool:
        """Whether tokens are guessed."""
        return self.draft != "none"

    def n_places(self, n_frames: int, n_nodes: int) -> int:
        """Frames that a ring holds, with those of guesses: with slow links more than one for each node are under way."""
        return max(n_frames, 2 * n_nodes) if self.guesses and n_frames >= n_nodes > 1 else n_frames

    @property
    def replay_bytes(self) -> int:
        """Bytes of sent rows that each node keeps."""
        return 0 if self.fixed else self.replay_memory


def _taps(text: str, flag: str) -> tuple[int, ...] | int:
    try:
        blocks = [int(part) for part in text.split(",") if part]
    except ValueError:
        raise UsageError(f"{flag} {text}: expected a number of blocks, or blocks like 3,7,11") from None
    if "," not in text and len(blocks) == 1 and blocks[0] >= 0:
        return blocks[0]
    if not blocks or blocks != sorted(set(blocks)) or blocks[0] < 0:
        raise UsageError(f"{flag} {text}: expected rising numbers of blocks, from 0 on")
    return tuple(blocks)


def _adapted(text: str, flag: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part for part in text.split(",") if part))
    if not found or any(one not in ADAPTED for one in found):
        raise UsageError(f"{flag} {text}: expected some of {', '.join(ADAPTED)}, with commas; the head cannot be adapted")
    return found


@dataclass(frozen=True)
class TuningOptions:
    """How a model is fine-tuned over a ring.

    Attributes:
        taps: blocks, or how many.
    """

    data: Annotated[Path | None, Option(
        "examples, one JSON object per line: text, or prompt and completion; with --head classes text and label", metavar="FILE"
    )] = None
    method: Annotated[str, Option(
        "side: a small network beside the frozen blocks learns from their outputs, which are computed once. The others are "
        "trained through the blocks, in torch on each node: lora, matrices beside those of the blocks; prompt, rows before a "
        "text; deep-prompt, also before each block; prefix, keys and values of each block (%(default)s)",
        choices=METHODS,
        brief="side: a small network beside the blocks, which learns on the starter alone; the others are trained through the "
        "blocks, in torch on each node (%(default)s)",
    )] = SIDE
    lora_r: Annotated[Annotated[int, Meta(ge=1, le=256)], Option("rank of lora (%(default)s)", metavar="N")] = 8
    lora_alpha: Annotated[Annotated[int, Meta(ge=1, le=1 << 16)], Option(
        "what lora adds is multiplied by alpha / rank (%(default)s)", metavar="N"
    )] = 16
    lora_targets: Annotated[tuple[str, ...], Option(
        "matrices that lora adapts, of query,key,value,projection,mlp (%(default)s)", metavar="A,B,...", read=_adapted,
        default="query,value",
    )] = ("query", "value")
    prompt_length: Annotated[Annotated[int, Meta(ge=1, le=1 << 12)], Option(
        "rows of a prompt or a prefix (%(default)s)", metavar="N"
    )] = 16
    micro_batches: Annotated[Annotated[int, Meta(ge=1, le=64)], Option(
        "parts of a step's examples that are on their way over the nodes at the same time, not with side (%(default)s)",
        metavar="N",
    )] = 4
    task: Annotated[str, Option(
        "what is learned: lm, to write as the examples do; classes, to tell their labels apart (%(default)s)", ("--head",),
        choices=("lm", "classes"),
    )] = "lm"
    held_out: Annotated[Path | None, Option(
        "examples to evaluate with, before and after, in the same form (default: none)", ("--eval",), metavar="FILE"
    )] = None
    taps: Annotated[tuple[int, ...] | int, Option(
        "how many blocks give their outputs to the side network besides the last one, or which, like 3,7,11 (%(default)s)",
        metavar="N|N,N,...", read=_taps, default="4",
    )] = 4
    width: Annotated[Annotated[int, Meta(ge=1, le=1 << 14)] | None, Option(
        "numbers of the side network's state (default: an eighth of the model's)", metavar="N"
    )] = None
    feature_bits: Annotated[str, Option(
        "bits of a stored number of an output (%(default)s)", choices=("16", "8")
    )] = "16"
    epochs: Annotated[Annotated[int, Meta(ge=1, le=1_000_000)], Option(
        "passes over the examples (%(default)s)", metavar="N"
    )] = 10
    batch_size: Annotated[Annotated[int, Meta(ge=1, le=1 << 16)], Option("examples per step (%(default)s)", metavar="N")] = 8
    lr: Annotated[Annotated[float, Meta(gt=0, le=1)], Option(
        "largest learning rate of AdamW; it rises, then falls linearly (%(default)s)", metavar="X"
    )] = 1e-3
    keep_logits: Annotated[bool, Option(
        "with --head lm: store the logits of the model's own head, too, 2 bytes for each word of its vocabulary and token; "
        "passes after the first then compute only what the side network adds to them"
    )] = False
    keep_features: Annotated[bool, Option("keep the stored outputs in --out, for a further --resume")] = False
    predict: Annotated[Path | None, Option(
        "nothing is learned: print the label of each text of FILE, as the folder --out has learned them", metavar="FILE"
    )] = None


@dataclass(frozen=True, kw_only=True)
class Options(StarterOptions):
    """Everything that a command can be given; what a command has no flag for is the default.

    Attributes:
        samples_of_one: texts of a single prompt.
        given: what was typed, by flag; `declared`: the command's options.
    """

    samples_of_one: int = DEFAULT_N_SAMPLES
    tuning: TuningOptions = TuningOptions()
    given: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    declared: tuple[Declared, ...] = field(default=(), repr=False, compare=False)

    # How much of this machine is used, and how weights are read
    cores: Annotated[tuple[int, ...] | None, Option(
        "CPU cores to run on (default: the nodes file, else any)", metavar="N,N-N,...", read=parse_cores
    )] = None
    window: Annotated[Units | None, Option(
        "keep only W halves of blocks (attention, MLP) in memory and read the next ones from the disk meanwhile, for models "
        "larger than memory (default: keep all; with --memory, as many as fit)", metavar="W",
    )] = None
    retain: Annotated[Units | None, Option(
        "with a window, always keep every T-th block in memory (default: none; with --memory, as many as fit)", metavar="T"
    )] = None
    memory: Annotated[int | None, Option(
        "limit for this process, such as 700MB: window and kept blocks are chosen to fit, and the run ends if it needs more",
        metavar="SIZE", read=parse_bytes,
    )] = None
    weights: Annotated[str, Option(
        "map: read packed weights from their file, which nodes of one machine share; copy: read them from a copy in memory; "
        "%(default)s: copy only if that is faster", choices=WEIGHT_MODES,
    )] = "auto"

    # Nodes and access to them
    nodes_config: Annotated[Path | None, Option(
        "nodes file (default: the nodes found in the network with the key of --key; in a checkout without a key "
        "src/settings_distr/configuration.json)",
        metavar="FILE",
    )] = None
    key: Annotated[Path | None, Option(
        "the cluster's key, the same on all nodes, made by `mdi key` (default: MDI_KEY_FILE, else none)", metavar="FILE"
    )] = None
    insecure: Annotated[bool, Option(
        "listen beyond this machine without a key: anybody who reaches the ports can use the node and read its traffic"
    )] = False
    nodes: Annotated[Count | None, Option(
        "without a nodes file: wait for N nodes, including this one, and print codes for boards that want to join (default: "
        "all nodes found within some seconds)", metavar="N",
    )] = None
    machines: Annotated[Count | None, Option(
        "N machines, including this one: print the line that makes another machine one of them, and wait until they are there; "
        "the cluster's key is made if there is none", metavar="N",
    )] = None
    addr: Annotated[str | None, Option(
        "this machine's address in the network of the nodes (default: that of the default route)"
    )] = None
    dial_port: Annotated[int | None, Option(
        "without a nodes file: let nodes that cannot be reached, for example behind a router, connect to this port (`mdi join "
        "--dial`)", metavar="PORT",
    )] = None
    swarm: Annotated[str | None, Option(
        "use standing nodes (`mdi join --model`), which hold the blocks already, and give them none; any one of them knows the "
        "others (default: those of the key in the network)",
        metavar="ADDR:PORT,...", nargs="?", const="",
    )] = None
    no_invite: Annotated[bool, Option("print no code for machines that want to join")] = False
    stop_nodes: Annotated[bool, Option("end the secondaries' processes after the run")] = False
    spares: Annotated[NotNegative, Option("extra nodes, which replace lost ones (%(default)s)", metavar="N")] = 0
    devices: Annotated[str | None, Option("device of each node, starter first", metavar="DEV,DEV,...")] = None
    pin: Annotated[bool, Option("run each node on its own share of --cores, or of all cores")] = False
    compare: Annotated[bool, Option("then generate the same texts on one node, and compare the speeds")] = False

    # A secondary
    place: Annotated[tuple[str, ...], Option(
        "nodes file, and this node's place in its list of secondaries, from 0 (no INDEX if the file describes only one "
        "secondary); default: in a checkout src/settings_distr/configuration.json 0",
        ("--nodes-config",), metavar=("FILE", "INDEX"), nargs="+",
    )] = ()
    cache_size: Annotated[int | None, Option(
        "limit for that folder, such as 20GB: the least recently used weights are deleted, and a run that needs more is "
        "refused (default: half of these weights and the free space together; what is in use stays, and no run is refused)",
        metavar="SIZE", read=parse_bytes,
    )] = None
    stand_with: Annotated[str | None, Option(
        "hold blocks of this model for all runs: those that the nodes of this key lack most. A name in the store, of a model "
        "that they hold (its parts come from the nearest), or on the hub, a folder, or a GGUF file",
        ("--model",), metavar="NAME",
    )] = None
    max_blocks: Annotated[Count | None, Option(
        "with --model: hold at most N blocks (default: as many as fit)", metavar="N"
    )] = None
    spare_memory: Annotated[int | None, Option(
        "while less than SIZE of this machine's memory is free, have fewer blocks; with --model of mdi join, none (default: 0; "
        "with --model, 5 %% of it)", metavar="SIZE", read=parse_bytes,
    )] = None
    peer: Annotated[tuple[str, ...], Option(
        "with --model: address of a node that takes part already; repeatable (default: the nodes of this key in the network)",
        metavar="ADDR:PORT", nargs="append",
    )] = ()
    no_announce: Annotated[bool, Option("do not announce this node in its network")] = False
    dial: Annotated[str | None, Option(
        "behind a router: connect to the --dial-port of a starter, which then reaches this node", metavar="ADDR:PORT"
    )] = None
    # A process of a job
    rank: Annotated[NotNegative | None, Option(
        "number of this process, from 0; process 0 runs COMMAND (default: MDI_RANK, else as the engine says)", metavar="N"
    )] = None
    size: Annotated[Count | None, Option(
        "number of processes of the job (default: MDI_SIZE, else as the engine says)", metavar="N"
    )] = None
    head: Annotated[str | None, Option(
        "where process 0 is (default: MDI_HEAD, else MASTER_ADDR, else as the engine says)", metavar="HOST[:PORT]"
    )] = None
    job: Annotated[tuple[str, ...], Option(
        "starter, run or serve, with its flags: what process 0 does", ("job",), metavar="COMMAND", nargs="..."
    )] = ()
    quiet: Annotated[bool, Option("")] = False
    until_stdin_closes: Annotated[bool, Option("")] = False
    where: Annotated[str | None, Option(
        "address that was printed with the invitation", ("where",), metavar="ADDR:PORT", nargs="?"
    )] = None
    code: Annotated[str | None, Option("code of the invitation", ("code",), metavar="CODE", nargs="?")] = None
    port_in: Annotated[int, Option("ring port, or the next free one (%(default)s)")] = 5088
    no_start: Annotated[bool, Option("fetch the key and end")] = False
    install_service: Annotated[bool, Option(
        "make this node a service of systemd, with these flags: it starts now, and after each reboot"
    )] = False
    uninstall_service: Annotated[bool, Option("end that service and remove it")] = False

    # Texts
    prompt: Annotated[tuple[str, ...], Option(
        f"text to continue, or FILE:path with one prompt per paragraph; may be repeated (default: {DEFAULT_PROMPT!r})",
        metavar="TEXT", nargs="append", default=None,
    )] = ()
    n_samples: Annotated[int | None, Option(
        f"texts to generate at once (default: one per prompt; {DEFAULT_N_SAMPLES} for a single one)"
    )] = None
    n_tokens: Annotated[int, Option("new tokens per sample (%(default)s)")] = 300
    temperature: Annotated[Annotated[float, Meta(ge=0)] | None, Option(
        "0 always takes the likeliest token (default: the model's generation_config.json, else 0.8)", metavar="T"
    )] = None
    top_k: Annotated[NotNegative | None, Option(
        "draw from the k likeliest tokens; 0 is all (default: generation_config.json, else all)", metavar="K"
    )] = None
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, Option(
        "... that have this probability together (default: generation_config.json, else 1)", metavar="P"
    )] = None
    min_p: Annotated[Share | None, Option(
        "... and none that is less probable than this part of the likeliest (default: generation_config.json, else 0.05)",
        metavar="P",
    )] = None
    beams: Annotated[int | None, Option(
        "search the best texts of each prompt, K at the same time, instead of drawing tokens; --n-samples of them are shown",
        metavar="K",
    )] = None
    length_penalty: Annotated[float, Option(
        "with --beams: a text's score is its log probability divided by its number of tokens to this power (%(default)s)"
    )] = 1.0
    early_stopping: Annotated[str, Option(
        "with --beams: end when K texts have ended (true), when none that goes on has a better score (false), or when none can "
        "get one (never) (%(default)s)", choices=("true", "false", "never"),
    )] = "false"
    stop: Annotated[tuple[str, ...], Option("end a text before TEXT; repeatable", metavar="TEXT", nargs="append")] = ()
    seed: Annotated[int | None, Option(
        "seed of the random numbers; the same seed gives the same texts (default: a new one, which is printed)", metavar="N"
    )] = None

    # A text that is scored
    scored: Annotated[str, Option(
        "the text that is scored: a file, or - for standard input", ("scored",), metavar="FILE", nargs="?"
    )] = ""
    text: Annotated[str | None, Option("the text itself, instead of FILE", metavar="TEXT")] = None
    tokens: Annotated[bool, Option("also every token, with its log probability")] = False

    # Going on with a run
    resume: Annotated[str | None, Option(
        "continue an interrupted run, named here or `last`, with its flags and prompts; --nodes-config may be given again; "
        "without a name, list such runs", metavar="RUN", nargs="?", const="",
    )] = None
    run_dir: Annotated[Path | None, Option(
        "folder for the journals of runs, readable by you only (default: runs/ in the cache folder)", metavar="DIR"
    )] = None
    no_journal: Annotated[bool, Option("write no journal; such a run cannot be resumed")] = False

    # What a run leaves behind, and what every command has
    json: Annotated[bool, Option("print one JSON object on stdout, and nothing else")] = False
    no_stream: Annotated[bool, Option("print the texts when they are complete")] = False
    plots: Annotated[bool, Option("write tokens over time as CSV and figure (logs/, img/)", ("-p", "--plots"))] = False
    time_run: Annotated[Path | None, Option("append one line about this run to a CSV file", metavar="FILE")] = None
    trace: Annotated[Path | None, Option(
        "write what each node did with each frame, as Chrome trace events; `mdi explain FILE` says what limited the run",
        metavar="FILE",
    )] = None
    verb: Annotated[bool, Option("print more about what happens", ("-v", "--verb"))] = False
    debug: Annotated[bool, Option(
        "write a debug log to logs/, and show tracebacks of errors", ("-d", "--debug")
    )] = False
    log_json: Annotated[bool, Option("write log lines as JSON objects")] = False

    # The server
    host: Annotated[str, Option("address to listen on (%(default)s: this machine only)")] = "127.0.0.1"
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)], Option("port to listen on (%(default)s; 0: any free one)")] = 8000
    api_key: Annotated[tuple[str, ...], Option(
        "key that clients must send; repeatable (default: MDI_API_KEY)", metavar="KEY", nargs="append"
    )] = ()
    api_key_file: Annotated[Path | None, Option(
        "one key per line, with an optional name, priority (a larger one goes first; 0) and role: user or operator",
        metavar="FILE",
    )] = None
    tls_cert: Annotated[Path | None, Option("certificate chain (PEM), to serve https", metavar="FILE")] = None
    tls_key: Annotated[Path | None, Option("private key of the certificate (PEM)", metavar="FILE")] = None
    allow_host: Annotated[tuple[str, ...], Option(
        "a host name that clients may use for this server, besides localhost and addresses; repeatable, * is any",
        metavar="NAME", nargs="append",
    )] = ()
    allow_origin: Annotated[tuple[str, ...], Option(
        "let web pages of this origin use the API, like https://example.org; repeatable, * is any", metavar="ORIGIN",
        nargs="append",
    )] = ()
    max_running: Annotated[Count, Option("texts of one model at the same time (%(default)s)", metavar="N")] = 256
    queue: Annotated[NotNegative, Option("waiting texts of one model; more get 429 (%(default)s)", metavar="N")] = 512
    keep_alive: Annotated[Annotated[float, Meta(gt=0)] | None, Option(
        "unload a model that was not used for so long (default: keep it until another model needs its memory)",
        metavar="SECONDS",
    )] = None
    ckpt_folder: Annotated[Path | None, Option(
        "folder of the models, perhaps on another disk (default: MDI_STORE, else {ckpt_folder})", ("--store", "--ckpt-folder"),
        metavar="DIR",
    )] = None
    alias: Annotated[tuple[str, ...], Option(
        "requests for a model whose name fits PATTERN (claude-*) get the model NAME; repeatable, the first that fits holds",
        metavar="PATTERN=NAME", nargs="append",
    )] = ()
    ollama_port: Annotated[Annotated[int, Meta(ge=0, le=65535)] | None, Option(
        "also serve Ollama's API, on this port (Ollama's own is 11434; 0: any free one); without API keys to this machine only",
        metavar="PORT",
    )] = None
    pooling: Annotated[str | None, Option(
        "embed texts with models whose files do not say how: the mean of all rows of a text, or the last row (default: refuse)",
        choices=POOLINGS,
    )] = None
    tool_parser: Annotated[str | None, Option(
        "how the models write calls of tools (default: as their chat templates say)", choices=TOOL_PARSERS,
    )] = None
    open: Annotated[bool, Option("open the server's page in a browser")] = False

    # Models on the disk
    model: Annotated[str, Option(
        "a model: its name in the store or on the hub (org/name; org/name:Q4_K_M is one GGUF file of many), a folder, or a "
        "GGUF file",
        ("model",), metavar="NAME", nargs="?",
    )] = ""
    words: Annotated[tuple[str, ...], Option(
        "text to answer; without it, a chat begins", ("words",), metavar="PROMPT", nargs="*"
    )] = ()
    shell: Annotated[str, Option("of which shell", ("shell",), metavar="SHELL", choices=("bash", "zsh", "fish"))] = ""
    name: Annotated[str, Option("name as `mdi list` shows it", ("name",), metavar="NAME")] = ""
    yes: Annotated[bool, Option("do not ask first", ("-y", "--yes"))] = False
    action: Annotated[str | None, Option(
        "remove what is named; without it, the folder is shown", ("action",), metavar="rm", nargs="?", choices=("rm",)
    )] = None
    what: Annotated[str, Option("a model, or a kind of files", ("what",), metavar="NAME|KIND", nargs="?")] = ""
    unused: Annotated[bool, Option("remove what no model that is still there needs")] = False
    limit: Annotated[int | None, Option(
        "remove the least recently used weights until the folder has no more than that", metavar="SIZE", read=parse_bytes
    )] = None
    n_nodes: Annotated[int | None, Option("cut the model for a ring of N nodes", metavar="N")] = None
    hf_token: Annotated[str | None, Option("for gated and private models (default: $HF_TOKEN)", metavar="TOKEN")] = None
    revision: Annotated[str | None, Option("branch, tag or commit (default: main)")] = None
    calibrate: Annotated[Path | None, Option(
        "a text like those that the model is for: q4_k and q6_k then round most exactly what its rows are multiplied with",
        metavar="FILE",
    )] = None
    export: Annotated[str | None, Option(
        "instead of cutting, write the model for other programs: hf, a Hugging Face directory (config.json, safetensors); "
        "gguf, a GGUF file, packed as --quantize says", choices=("hf", "gguf")
    )] = None
    out: Annotated[Path | None, Option(
        "folder for the model and its chunks, or for the result of --export (default: MODEL; for a Hugging Face directory "
        "elsewhere, one of its name in the checkpoints folder)", metavar="DIR",
    )] = None
    model_name: Annotated[str | None, Option("an entry of litgpt's table; config.json must agree", metavar="NAME")] = None

    # A plan
    profiles: Annotated[Path | None, Option("profiles of nodes and links, instead of nodes", metavar="FILE")] = None
    fresh: Annotated[bool, Option("measure again instead of using stored results")] = False
    save_profiles: Annotated[Path | None, Option("write what was measured, for --profiles", metavar="FILE")] = None
    only: Annotated[tuple[str, ...], Option(
        "only these nodes of the profiles, starter first", ("--nodes",), metavar="NAME", nargs="+", default=None
    )] = ()
    example: Annotated[bool, Option("print example profiles, and end")] = False
    config: Annotated[str | None, Option(
        "a model without its checkpoint: its name on the hub, litgpt's name, or a model_config.yaml (default: the model that "
        "the profiles were measured with)", metavar="NAME",
    )] = None

    prompt_tokens: Annotated[Length | None, Option(
        "tokens of a prompt whose time to the first token is predicted (default: 512, or what the sequence length leaves)",
        metavar="P",
    )] = None
    aim: Annotated[Annotated[str, one_of(AIMS)], Option(
        "tokens: the speed of --n-samples texts; clients: the most texts that --per-client allows (%(default)s)", choices=AIMS
    )] = "tokens"
    per_client: Annotated[tuple[int, float] | None, Option(
        "with --aim clients: tokens of each text, and tokens/s that it gets at least, such as 4096:2", metavar="L:X",
        read=_per_client,
    )] = None
    draft_rate: Annotated[Annotated[float, Meta(ge=0, lt=1)] | None, Option(
        "also predict the speed of one text with --draft, if this part of its guesses is right", metavar="P"
    )] = None

    # Other commands
    file: Annotated[Path, Option("the key file", ("file",), metavar="FILE")] = Path()
    invite: Annotated[bool, Option("print a code with which one board can fetch the key (`mdi join`)")] = False
    add: Annotated[bool, Option("add a new key, which nodes then accept")] = False
    switch: Annotated[bool, Option("sign with the newest key; the others are still accepted")] = False
    drop: Annotated[bool, Option("remove all keys but the one that signs")] = False
    listen: Annotated[str | None, Option(
        "address for --invite (default: this machine's, port 8088)", metavar="ADDR[:PORT]"
    )] = None
    compared: Annotated[str | None, Option(
        "compute a few texts with this GGUF file here, and with llama.cpp (llama-cpp-python), and print what differs",
        ("--model",), metavar="FILE", fact=COMPARED,
    )] = None
    deadline: Annotated[Annotated[float, Meta(ge=0.1, le=600)], Option(
        "time limit of each connection and each answer (%(default)s)", metavar="SECONDS"
    )] = 5.0

    def with_given(self, flags: dict[str, Any]) -> Options:
        """These options with other flags, as they were typed, which must go together. Raises UsageError."""
        given = {**self.given, **flags}
        options = replace(made(Options, self.declared, given), given=given, declared=self.declared)
        refuse(facts_of(options, self.declared))
        return options


# fmt: on
# What several commands have
MACHINE = ("device", "threads", "cores", "window", "retain", "memory", "weights", "mlock", "kv_memory", "compile")
MODEL = (
    "model", "ckpt", "ckpt_folder", *MACHINE, "dtype", "quantize", "quantize_head", "allow_clipping", "kv_dtype",
    "sequence_length",
)  # fmt: skip
ACCESS = ("key", "insecure")
DISCOVERY = ("swarm", "nodes", "machines", "addr", "dial_port", "no_invite")
RING = (
    "chunk", "layers", "placement", "fixed", "silence_s", "replay_memory", "hot_spare", "verify", "wait_s", "wire_dtype",
    "n_frames",
)  # fmt: skip
PARALLEL = ("mode", "parts", "algorithm", "reduce_dtype", "is_head_shared")
DRAFT = ("draft", "draft_inexact", "adapter")
DRAWING = ("n_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "prompt_style", "seed", *DRAFT)
GENERATION = ("prompt", "n_samples", *DRAWING, "beams", "length_penalty", "early_stopping")
TUNING = (
    "data", "held_out", "method", "task", "lora_r", "lora_alpha", "lora_targets", "prompt_length", "micro_batches",
    "taps", "width", "feature_bits", "epochs", "batch_size", "lr", "keep_logits", "keep_features", "predict",
)  # fmt: skip
RESUME = ("resume", "run_dir", "no_journal")
OUTPUT = ("json", "no_stream", "plots", "time_run", "trace")
COMMON = ("verb", "debug", "log_json")
NODE = (
    "cache_dir", "cache_size", "prefix_dir", *MACHINE, "spare_memory", "dtype", "quantize", "allow_clipping", "no_announce",
    "dial",
)  # fmt: skip
SERVER = (
    "host", "port", "api_key", "api_key_file", "tls_cert", "tls_key", "allow_host", "allow_origin", "max_running", "queue",
    "keep_alive", "keep_prefixes", "alias", "tool_parser", "ollama_port", "pooling", "open",
)  # fmt: skip
