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

from typing import Any

from mdi.errors import AccessError, UsageError
from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser
from mdi.terminal import show

INVITE_PORT = 8088


def add_arguments(parser: Parser) -> None:
    parser.options(None, "file")
    parser.options(None, "invite", "add", "switch", "drop", is_one=True)
    parser.options(None, "listen", *COMMON)


def run(options: Options) -> int:
    from mdi.net.keys import N_KEYS_LIMIT, KeyFile, new_secret, write_keys

    path = options.file.expanduser()
    if options.invite:
        return invite(KeyFile(path), options.listen)
    if options.add or options.switch or options.drop:
        keys = KeyFile(path).keys
        if options.add and len(keys) == N_KEYS_LIMIT:
            raise UsageError(f"{path} holds {N_KEYS_LIMIT} keys already: drop some with --drop")
        changed = (*keys, new_secret()) if options.add else (keys[-1], *keys[:-1]) if options.switch else keys[:1]
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
    from mdi.net.invitation import VALID_S, Invitation
    from mdi.net.keys import text_of

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
