"""Make the key of a cluster, change it, or invite a board to fetch it. Keep the file secret: with the key, anybody can use
the nodes.

examples:
  mdi key cluster.key
      a new key; copy the file to each node, and start all nodes with --key cluster.key (or MDI_KEY_FILE)
  mdi key cluster.key --invite
      prints a code for one use within 15 minutes; on the board: mdi join 192.168.1.10:8088 CODE
  mdi key cluster.key --add       (copy the file to all nodes)
  mdi key cluster.key --switch    (copy the file to all nodes)
  mdi key cluster.key --drop      (copy the file to all nodes)
      these three steps change the key while nodes run; nodes read the file again when it changes
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mdi.errors import AccessError, UsageError
from mdi.terminal import show

INVITE_PORT = 8088


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import add_common_flags

    parser.add_argument("file", type=Path, metavar="FILE", help="the key file")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--invite", action="store_true", help="print a code with which one board can fetch the key (`mdi join`)"
    )
    what.add_argument("--add", action="store_true", help="add a new key, which nodes then accept")
    what.add_argument("--switch", action="store_true", help="sign with the newest key; the others are still accepted")
    what.add_argument("--drop", action="store_true", help="remove all keys but the one that signs")
    parser.add_argument(
        "--listen", metavar="ADDR[:PORT]", help=f"address for --invite (default: this machine's, port {INVITE_PORT})"
    )
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    from mdi.security.keys import N_KEYS_LIMIT, KeyFile, new_secret, write_keys

    path = args.file.expanduser()
    if args.invite:
        return invite(KeyFile(path), args.listen)
    if args.add or args.switch or args.drop:
        keys = KeyFile(path).keys
        if args.add and len(keys) == N_KEYS_LIMIT:
            raise UsageError(f"{path} holds {N_KEYS_LIMIT} keys already: drop some with --drop")
        changed = (*keys, new_secret()) if args.add else (keys[-1], *keys[:-1]) if args.switch else keys[:1]
        write_keys(path, changed)
        show(f"{path} holds {len(changed)} keys; copy it to every node before the next step")
        return 0
    if path.exists():
        raise UsageError(
            f"{path} exists: a new key would shut out all nodes that have the old one. To change the key, begin with --add"
        )
    write_keys(path, (new_secret(),))
    show(f"wrote {path}: copy it to each node, and start all nodes with --key {path}")
    return 0


def invite(keys: Any, listen: str | None) -> int:
    """Wait until one board has fetched the keys, or the time is over. Raises UsageError, AccessError."""
    import mdi
    from mdi.cli.access import own_address, split_address
    from mdi.control.server import ControlServer, StatusOnly
    from mdi.security.invitation import VALID_S, Invitation
    from mdi.security.keys import text_of

    class Inviting(StatusOnly):
        def status(self, run: str | None) -> dict[str, Any]:
            return {"name": "invitation", "version": mdi.__version__, "state": "IDLE"}

    addr, port = split_address(listen, INVITE_PORT) if listen else (own_address(), INVITE_PORT)
    invitation = Invitation(text_of(keys.keys).encode())
    server = ControlServer(Inviting(), addr, port, "invitation", keys, invitation)
    try:
        show(f"on the board, within 15 minutes:  mdi join {addr}:{server.port} {invitation.code}")
        if not invitation.used.wait(VALID_S):
            raise AccessError("no board joined within 15 minutes: the code is not valid any more")
    finally:
        server.close()  # once the board has its answer
    show("a board has joined; the code is not valid any more")
    return 0
