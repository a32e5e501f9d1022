"""What cannot be had together, or not without something else: one table, of which refusals and docs/configuration.md are made.

A fact is a flag ("--swarm"), a flag with a value ("--parallel tensor"), or something that only a run or a node finds: these are
the constants here, and whoever finds one says how it is called in an error. Limits of single values are with their options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mdi.errors import Code, UsageError
from mdi.spec.parser import Declared, declared

MANY = "several nodes"
MODEL = "the name of a model"
NAMED_GROUPS = "groups in the nodes file"
TOGETHER = "nodes compute blocks together"
TORCH = "a node computes in torch"
WINDOW = "a window of weights"
GRADIENTS = "gradients"
SIDES = "a side network (--adapter DIR)"
GUESSES = "a small model that guesses (--draft DIR)"
STAGES = "a ring of groups"
OWN_RING = "a ring of processes (--nodes N)"
CHUNKS = "chunks"
COMPARED = "a model that is compared (--model)"


@dataclasses.dataclass(frozen=True)
class Rule:
    """`what` goes with none of `others`, or only with one of them.

    Attributes:
        what, others: facts.
        text: the error, with {what} and {found}: what was there of the others; or what is needed.
        is_need: whether one of the others is needed.
        given: facts without which there is nothing to refuse.
        code: USAGE where a node finds it, which says so to its starter.
    """

    what: str
    others: tuple[str, ...]
    text: str
    is_need: bool = False
    given: tuple[str, ...] = ()
    code: Code = Code.FLAGS


# fmt: off
RULES = (
    Rule(MODEL, ("--ckpt", "--config"), "{what} and {found} both say which model it is: give one of them"),
    *(
        Rule(flag, ("--weights", "--mlock"), "{what} reads weights into memory of its own: leave {found} out")
        for flag in ("--window", "--memory")
    ),
    Rule("--retain", ("--window", "--memory"), "{what} needs a window: give {found} as well", is_need=True),
    Rule(WINDOW, (TORCH,), "{found}, and --window and --memory are for the kernels: leave them out", code=Code.USAGE),
    Rule(
        "--kv-dtype int8", (TORCH,), "{what}: {found}, and only the kernels have such caches: use bf16 or fp16",
        code=Code.USAGE,
    ),
    Rule("--layers", ("--parallel tensor",), "{what}: with {found} each node has a share of every block: use --shares"),
    Rule(
        "--head", (STAGES,),
        "{what} shared needs all nodes in one group, not {found}: use --parallel tensor, or leave it out",
    ),
    Rule(
        TOGETHER, (TORCH,), "{found}, and shares of blocks are for the kernels, on a CPU: take this node out of the group",
        code=Code.USAGE,
    ),
    Rule("--adapter", ("--parallel tensor",), "{what}: adapters cannot be shared out with {found}: use --parallel ring"),
    Rule(
        "--adapter", (TORCH, TOGETHER), "{what}: {found}, and adapters are for nodes with whole blocks in the kernels",
        code=Code.USAGE,
    ),
    Rule(
        SIDES, ("--parallel tensor", "--parallel auto"),
        "{what} needs outputs of single blocks, which there are not with {found}: use --parallel ring",
    ),
    Rule(SIDES, (TOGETHER,), "{what} needs outputs of single blocks, but {found}: use --parallel ring, and no groups"),
    Rule(
        GUESSES, (TORCH,),
        "{what}: {found}, where rows may differ in their last bits in other company (--draft-inexact guesses all the same)",
    ),
    Rule(
        "--beams", ("--verify",),
        "{what}: what a search for the best texts has dropped cannot be computed again: leave {found} out",
    ),
    *(
        Rule("--verify", others, text, given=(MANY,))
        for others, text in (
            (("--fixed", "--replay-memory 0"), "{what}: nodes keep no rows with {found}: leave that out"),
            (("--parallel tensor",), "{what}: nodes compute blocks together with {found}: use --parallel ring"),
            ((SIDES,), "{what}: outputs of single blocks are not compared, and {found} is made of them"),
            ((TORCH,), "{what} compares rows bit by bit, but {found}: it needs whole blocks in the kernels"),
        )
    ),
    Rule(
        "--hot-spare", ("--fixed", "--parallel tensor", "--parallel auto", NAMED_GROUPS, "--verify", "--swarm"),
        "{what} takes over the blocks that one node alone has in a ring that may change: leave {found} out",
    ),
    Rule(
        GRADIENTS, (TORCH, WINDOW, TOGETHER),
        "{found}: gradients go through whole blocks in the kernels' form only: no windows, groups or GPUs", code=Code.KERNELS,
    ),
    Rule(
        "--swarm", ("--layers", "--placement", "--parallel tensor", "--parallel auto", "--nodes-config"),
        "{what}: nodes keep the blocks that they have: leave {found} out",
    ),
    Rule(
        "--swarm", ("--stop-nodes",),
        "{what}: standing nodes serve other runs, too, and end on their own machines: leave {found} out",
    ),
    Rule(
        "--machines", ("--nodes", "--nodes-config"),
        "{what} says which nodes there are, and so does {found}: give one of them",
    ),
    Rule(
        COMPARED, ("--ckpt", "--layers", "--nodes-config", "--key", "--insecure", "--addr", "--deadline"),
        "{what} is computed by this machine alone: leave {found} out",
    ),
    Rule(OWN_RING, ("--nodes-config",), "{what} is one of its own, and {found} describes another: give one of them"),
    Rule("--profiles", ("--nodes-config",), "{what} and {found} both say which nodes there are: give one of them"),
    Rule("--compare", ("--json",), "{what} prints for people: leave {found} out"),
    Rule("--compare", ("--ckpt",), "{what} needs the whole model: give {found} as well", is_need=True),
    Rule(
        "--model", ("--ckpt", "--chunk", "--dial"),
        "{what}: a standing node has the parts of this model, and is reached directly: leave {found} out",
    ),
    *(
        Rule(flag, ("--model",), "{what} is for a standing node: give {found} NAME as well", is_need=True)
        for flag in ("--max-blocks", "--peer")
    ),
    Rule("--tls-cert", ("--tls-key",), "{what} and {found} belong together: give both", is_need=True),
    Rule("--tls-key", ("--tls-cert",), "{what} and {found} belong together: give both", is_need=True),
    *(
        Rule(
            flag, ("--n-nodes", "--layers"),
            "{what} makes smaller chunks: say for how many nodes with {found} (--n-nodes 1 for this machine alone)",
            is_need=True, given=(CHUNKS,),
        )
        for flag in ("--quantize", "--quantize-head")
    ),
    Rule("--export", ("--n-nodes", "--layers"), "{what} writes one directory: leave {found} out"),
    Rule("--export", ("--out",), "{what} writes a new directory: give {found} DIRECTORY as well", is_need=True),
)
# fmt: on


def refuse(facts: Mapping[str, str] | Iterable[str], *of: str) -> None:
    """Raises UsageError for the first of the rules that these facts break.

    Args:
        facts: with what an error calls them, if that is not their name.
        of: only the rules of these.
    """
    named = facts if isinstance(facts, Mapping) else {fact: fact for fact in facts}
    for rule in RULES:
        if rule.what not in (of or named) or not all(fact in named for fact in (rule.what, *rule.given)):
            continue
        found = [named[fact] for fact in rule.others if fact in named]
        if rule.is_need != bool(found):
            words = " or ".join(rule.others) if rule.is_need else " and ".join(found)
            raise UsageError(rule.text.format(what=named[rule.what], found=words), code=rule.code)


def facts_of(options: Any, of: Iterable[Declared] | None = None) -> dict[str, str]:
    """The facts that options say: a flag is one, with and without its value, if that is not the default.

    Args:
        of: the options of a command; None is all.
    """
    values = dict(_values(options))
    cls: Any = type(options)
    found: dict[str, str] = {}
    for one in declared(cls).values() if of is None else of:
        value = values.get(one.name, one.default)
        if value != one.default:
            found |= {fact: fact for fact in (one.fact, f"{one.fact} {value}")}
    return found


def _values(options: Any) -> Iterator[tuple[str, Any]]:
    """Those of all fields, also of the options within."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value) and field.name in ("parallel", "tuning"):
            yield from _values(value)
        yield field.name, value
