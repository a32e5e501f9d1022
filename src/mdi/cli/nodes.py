"""List the nodes of a cluster that are in this network, with address, state and memory.

examples:
  mdi nodes --key cluster.key
  mdi nodes
      with the key that `mdi join` fetched
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mdi.spec.options import ACCESS, COMMON, Options
from mdi.spec.parser import Parser

if TYPE_CHECKING:
    from mdi.cancel import Cancel


def add_arguments(parser: Parser) -> None:
    from mdi.cli.discover import LISTEN_S

    wait = {"help": "how long to listen for nodes (%(default)s)", "default": LISTEN_S}
    parser.options(None, *ACCESS, "addr", "wait_s", "json", *COMMON, wait_s=wait)


def run(options: Options, cancel: Cancel) -> int:
    from mdi.cli.access import users_keys
    from mdi.cli.discover import Discovery
    from mdi.cli.output import print_json
    from mdi.columns import table
    from mdi.errors import UsageError
    from mdi.terminal import show

    keys = users_keys(options)
    if keys is None:
        raise UsageError("nodes are found by their key: give it with --key FILE, or fetch it with `mdi join`")
    if not 0 < options.wait_s <= 600:
        raise UsageError(f"--wait must be more than 0 and at most 600 seconds, got {options.wait_s}")
    with Discovery(options, cancel) as discovery:
        nodes = discovery.present_now(keys, options.wait_s)
    rows = [as_row(node.announcement.name, node.label, node.status) for node in nodes]
    if options.json:
        print_json({"nodes": rows})
    elif not rows:
        show("no node of this key answers in this network: run `mdi join` on a board, see `mdi join --help`")
    else:
        head = {name: name for name in rows[0]}
        show("\n".join(table([list(row.values()) for row in (head, *rows)])))
    return 0


def as_row(name: str, label: str, status: dict[str, object]) -> dict[str, str]:
    """The status of a node in words."""
    from mdi.cli.discover import free_memory
    from mdi.units import duration, size

    up_s, free = status.get("up_s"), free_memory(status)
    blocks = status.get("blocks")
    model = str(status.get("model") or "-")
    if isinstance(blocks, list) and len(blocks) == 2:
        model += f", blocks {blocks[0]}-{int(blocks[1]) - 1}"
    return {
        "name": name,
        "address": label.removeprefix(f"{name} at "),
        "state": str(status.get("state")),
        "up": duration(up_s) if isinstance(up_s, (int, float)) else "-",
        "memory free": size(free) if free is not None else "-",
        "device": str(status.get("device") or "-"),
        "version": str(status.get("version") or "-"),
        "model": model,
    }
