"""Run a command over all processes that an engine of a cluster has started: process 0 is the starter, the others are its nodes.

examples:
  srun --ntasks 4 --kill-on-bad-exit mdi job --key ~/cluster.key starter org/name --prompt "Who are you?"
      Slurm says which process this is, how many there are, and on which machine the first one runs
  mpirun -np 4 --host a,b,c,d -x MDI_HEAD=a mdi job --key ~/cluster.key starter org/name
  torchrun --nnodes 4 --node-rank 0 --master-addr a --no-python mdi job --key ~/cluster.key serve org/name
  mdi job --rank 1 --size 4 --head a --key ~/cluster.key run org/name
      any other engine: numbers as flags, or as MDI_RANK, MDI_SIZE and MDI_HEAD

Make the key once (`mdi key FILE`) where all machines can read it. Flags before COMMAND are those of a node, like those of
`mdi join`. All processes must be able to connect to each other. The nodes end with the starter; `serve` ends when the engine
ends it. See deploy/ for Kubernetes and Ray.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mdi.control.web_pages import is_here
from mdi.errors import ControlError, UsageError
from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser

COMMANDS = ("starter", "run", "serve")
IS_ENDED_AT_ONCE = True
N_DIAL_PORTS = 1000


@dataclass(frozen=True)
class _Engine:
    """Variables of a process's number, of how many there are, of how many of them are here, and of the job's number.

    Attributes:
        first_job: the number of a job that shares no machine with another one.
    """

    rank: str
    size: str
    local: str = ""
    job: str = ""
    first_job: int = 0


_OWN = _Engine("MDI_RANK", "MDI_SIZE", "MDI_LOCAL_SIZE")
_SLURM = _Engine("SLURM_PROCID", "SLURM_NTASKS", job="SLURM_JOB_ID")
# One may start another, whose processes then have the variables of both: who is started by the others comes first.
_ENGINES = (
    _Engine("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", 29500),  # torchrun
    _Engine("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_ess_base_jobid"),
    _Engine("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH
    _SLURM,
)


@dataclass(frozen=True)
class Place:
    """The place of this process in a job.

    Attributes:
        head, port: where process 0 waits for the others.
        is_local: all processes are on this machine.
    """

    rank: int
    size: int
    head: str
    port: int
    is_local: bool


FIRST = ("--rank", "--size", "--head", "--key", "--addr", "--cache-dir", "--device", "--threads", "--memory", "--verb")


def add_arguments(parser: Parser) -> None:
    from mdi.cli.secondary import add_node_options

    parser.options(None, "rank", "size", "head", "key", "addr")
    add_node_options(parser)
    parser.options(None, *COMMON, "job")


def run(options: Options) -> int:
    from mdi.cli import Acknowledged, launch, show_failure
    from mdi.cli.secondary import serve
    from mdi.spec.cluster import NodeConfig

    command = options.job[1:] if options.job[:1] == ("--",) else options.job
    if not command or command[0] not in COMMANDS:
        raise UsageError(f"say what process 0 is to do: {', '.join(COMMANDS)}, with its flags (see `mdi job --help`)")
    place = place_of(options, os.environ)
    if place.rank == 0:
        return launch(command[0], [*command[1:], *head_flags(options, place, command[0])], prog=f"mdi {command[0]}")
    if options.key is None and not os.environ.get("MDI_KEY_FILE"):
        raise UsageError(_NO_KEY)
    addr = options.addr or ("127.0.0.1" if place.is_local else address_towards(place.head))
    name = f"{socket.gethostname()[:40]}-{place.rank}"
    dial = f"{_bracketed(place.head)}:{place.port}"
    try:
        return serve(replace(options, dial=dial, wait_s=wait_of(command)), NodeConfig(name, addr, 0, 0))
    except ControlError as e:  # process 0 is not there
        show_failure(e)
        return Acknowledged(1)  # the job ends at once, and not when the kernels have been compiled


def wait_of(command: Sequence[str]) -> float:
    """How long process 0 waits for others, by its --wait, and they for it. Raises UsageError: it does not have these flags."""
    from mdi.cli import COMMANDS as MODULES
    from mdi.cli import options_of, parser_of

    parser = parser_of(importlib.import_module(MODULES[command[0]][0]), f"mdi {command[0]}")
    parse = parser.parse_intermixed_args if "words" in parser.declared else parser.parse_args
    wait_s: float = options_of(parser, parse(list(command[1:]))).wait_s
    return wait_s


def address_towards(head: str) -> str:
    """This machine's address for the others. It often knows its own name as a loopback address, which only it reaches."""
    from mdi.cli.access import own_address

    addr = own_address(head)
    return own_address() if is_here(addr) else addr


_NO_KEY = "the processes need a key: make one with `mdi key FILE` where all machines can read it, and give --key FILE"


def head_flags(options: Options, place: Place, command: str) -> list[str]:
    """Flags that the starter's command needs besides the user's flags. Raises UsageError."""
    from mdi.cli.access import ip_address

    if place.size == 1:
        return []
    key = options.key or os.environ.get("MDI_KEY_FILE")
    if not key:
        raise UsageError(_NO_KEY)
    addr = options.addr or ("127.0.0.1" if place.is_local else ip_address(place.head))
    if is_here(addr) and not place.is_local:
        addr = address_towards(place.head)
    flags = [
        "--machines",
        str(place.size),
        "--no-invite",
        "--dial-port",
        str(place.port),
        "--addr",
        addr,
        "--key",
        str(key),
    ]
    return flags if command == "serve" else [*flags, "--stop-nodes"]


def place_of(options: Options, environment: Mapping[str, str]) -> Place:
    """This process's place, from flags and from what the engine has put into the environment. Raises UsageError."""
    from mdi.cli.access import split_address

    engine = _engine_of(options, environment)
    rank, size, local = (_number(environment, name) for name in (engine.rank, engine.size, engine.local))
    if engine is _OWN:
        rank = _own_rank(environment, rank) if options.rank is None else options.rank
        size = size if options.size is None else options.size
    if rank is None or size is None:
        raise UsageError(
            "this process was started by none of Slurm, MPI and torchrun, or only one of its number and how many there are was "
            "given: give both, with --rank and --size or with MDI_RANK and MDI_SIZE"
        )
    if rank >= size:
        raise UsageError(f"there is no process {rank} of {size}: they count from 0")
    is_local = size == local or environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES")) == "1"
    named = options.head or environment.get("MDI_HEAD") or environment.get("MASTER_ADDR")
    if not named and (hosts := environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")):
        named = first_host(hosts)
    if not named and not is_local and size > 1:
        raise UsageError(
            "say where process 0 is: --head HOST, or MDI_HEAD for all processes (`mpirun -x MDI_HEAD=HOST`)"
        )
    port = _dial_port(engine, environment)
    head, port = split_address(named, port) if named else ("127.0.0.1", port)
    return Place(rank, size, "127.0.0.1" if is_local else head, port, is_local)


def _engine_of(options: Options, environment: Mapping[str, str]) -> _Engine:
    """Which one says the number of this process and how many there are: both come from the same one."""
    given = (options.rank, options.size, environment.get(_OWN.rank), environment.get(_OWN.size))
    if any(one not in (None, "") for one in given):
        return _OWN
    return next((one for one in _ENGINES if environment.get(one.rank) and environment.get(one.size)), _OWN)


def _own_rank(environment: Mapping[str, str], rank: int | None) -> int | None:
    """MDI_RANK, else the number of a pod of a StatefulSet."""
    if rank is None and environment.get("MDI_HEAD"):
        return _ordinal(environment.get("HOSTNAME") or socket.gethostname())
    return rank


def _dial_port(engine: _Engine, environment: Mapping[str, str]) -> int:
    """Where process 0 waits for the others: two jobs may share a machine, and have different numbers."""
    from mdi.cli.access import DIAL_PORT

    number = _number(environment, engine.job)
    if number is None:
        engine, number = _SLURM, _number(environment, _SLURM.job) or 0
    return DIAL_PORT + (number - engine.first_job) % N_DIAL_PORTS


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts: "gpu[03-05,9],b" is "gpu03"."""
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", hosts)[0])


def _ordinal(host: str) -> int | None:
    found = re.search(r"-([0-9]+)(\.|$)", host)
    return int(found[1]) if found else None


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "") if name else ""
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} must be a whole number, got {text[:40]!r}")
    return int(text)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
