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

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mdi.errors import UsageError
from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser

COMMANDS = ("starter", "run", "serve")
IS_ENDED_AT_ONCE = True

# Engine -> variables of a process's number, how many there are, and how many of them are on this machine.
_ENGINES = {
    "MDI": ("MDI_RANK", "MDI_SIZE", "MDI_LOCAL_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", ""),
    "OpenMPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
}


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


def add_arguments(parser: Parser) -> None:
    from mdi.cli.secondary import add_node_options

    parser.options(None, "rank", "size", "head", "key", "addr")
    add_node_options(parser)
    parser.options(None, *COMMON, "job")


def run(options: Options) -> int:
    from mdi.cli import launch
    from mdi.cli.access import own_address
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
    addr = options.addr or ("127.0.0.1" if place.is_local else own_address(place.head))
    name = f"{socket.gethostname()[:40]}-{place.rank}"
    return serve(replace(options, dial=f"{_bracketed(place.head)}:{place.port}"), NodeConfig(name, addr, 0, 0))


_NO_KEY = "the processes need a key: make one with `mdi key FILE` where all machines can read it, and give --key FILE"


def head_flags(options: Options, place: Place, command: str) -> list[str]:
    """Flags that the starter's command needs besides the user's flags. Raises UsageError."""
    from mdi.cli.access import ip_address, own_address

    if place.size == 1:
        return []
    key = options.key or os.environ.get("MDI_KEY_FILE")
    if not key:
        raise UsageError(_NO_KEY)
    addr = options.addr or ("127.0.0.1" if place.is_local else ip_address(place.head))
    if addr.startswith("127.") and not place.is_local:  # a machine often knows its own name as a loopback address
        addr = own_address()
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
    from mdi.cli.access import DIAL_PORT, split_address

    rank, size, local = options.rank, options.size, None
    for engine, names in _ENGINES.items():
        found = [_number(environment, name) for name in names]
        if rank is None and found[0] is None and engine == "MDI" and environment.get("MDI_HEAD"):
            found[0] = _ordinal(environment.get("HOSTNAME") or socket.gethostname())  # of a StatefulSet
        if found[0] is not None and found[1] is not None or engine == "MDI":
            rank, size = (found[0] if rank is None else rank), (found[1] if size is None else size)
            local = found[2] if local is None else local
        if rank is not None and size is not None:
            break
    if rank is None or size is None:
        raise UsageError(
            "this process was started by none of Slurm, MPI and torchrun: give its number and how many there are with "
            "--rank and --size"
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
    # Two jobs of Slurm may share a machine.
    port = DIAL_PORT + int(environment.get("SLURM_JOB_ID") or 0) % 1000
    head, port = split_address(named, port) if named else ("127.0.0.1", port)
    return Place(rank, size, "127.0.0.1" if is_local else head, port, is_local)


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
