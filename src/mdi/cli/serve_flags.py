"""Flags of serve.py that belong to the API."""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from mdi.errors import UsageError

if TYPE_CHECKING:
    from mdi.serve.serve_settings import ApiKey, ServeSettings

KEY_VARIABLE = "MDI_API_KEY"
PRIORITY_LIMIT = 1000


def add_serve_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    from mdi.cli import default_ckpt_folder

    api = parser.add_argument_group("API")
    api.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s: this machine only)")
    api.add_argument("--port", type=int, default=8000, help="port to listen on (%(default)s; 0: any free one)")
    api.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="key that clients must send; repeatable "
        f"(default: {KEY_VARIABLE})",
    )  # fmt: skip
    api.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="one key per line, with an optional name and priority; "
        "a larger priority goes first (0)",
    )  # fmt: skip
    api.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM), to serve https")
    api.add_argument("--tls-key", type=Path, metavar="FILE", help="private key of the certificate (PEM)")
    api.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a host name that clients may use for this "
        "server, besides localhost and addresses; repeatable, * is any",
    )  # fmt: skip
    api.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="let web pages of this origin use the API, like "
        "https://example.org; repeatable, * is any",
    )  # fmt: skip
    api.add_argument(
        "--max-running", type=int, default=256, metavar="N", help="texts of one model at the same time (%(default)s)"
    )
    api.add_argument(
        "--queue", type=int, default=512, metavar="N", help="waiting texts of one model; more get 429 (%(default)s)"
    )
    api.add_argument(
        "--keep-alive", type=float, metavar="SECONDS", help="unload a model that was not used for so long (default: keep it "
        "until another model needs its memory)",
    )  # fmt: skip
    api.add_argument(
        "--ckpt-folder", type=Path, default=default_ckpt_folder(), metavar="DIR", help="folder of the models that requests can "
        "name (%(default)s)",
    )  # fmt: skip
    api.add_argument("--open", action="store_true", help="open the server's page in a browser")
    return api


def serve_settings(args: argparse.Namespace) -> ServeSettings:
    """Raises UsageError."""
    from mdi.serve.serve_settings import ServeSettings

    if not 0 <= args.port < 65536:
        raise UsageError(f"--port must be from 0 to 65535, got {args.port}")
    if args.max_running < 1 or args.queue < 0:
        raise UsageError("--max-running must be at least 1, and --queue at least 0")
    if args.keep_alive is not None and not (args.keep_alive > 0 and math.isfinite(args.keep_alive)):
        raise UsageError(f"--keep-alive must be more than 0 seconds, got {args.keep_alive}")
    if (args.tls_cert is None) != (args.tls_key is None):
        raise UsageError("--tls-cert and --tls-key belong together")
    if args.tls_cert is not None:
        _check_tls(args.tls_cert, args.tls_key)
    keys = _keys(args)
    if not keys and not args.insecure and not _is_loopback(args.host):
        raise UsageError(
            f"--host {args.host} lets everybody in the network use the nodes: give --api-key-file FILE (or --insecure, if "
            "everybody may)"
        )
    return ServeSettings(
        host=args.host,
        port=args.port,
        keys=keys,
        tls_cert=None if args.tls_cert is None else str(args.tls_cert),
        tls_key=None if args.tls_key is None else str(args.tls_key),
        hosts=tuple(args.allow_host),
        origins=tuple(args.allow_origin),
        max_running=args.max_running,
        max_waiting=args.queue,
        keep_alive_s=args.keep_alive,
    )


def _keys(args: argparse.Namespace) -> tuple[ApiKey, ...]:
    """Of the flags, the file and the environment."""
    from mdi.security.keys import check_private

    lines = [*args.api_key]
    if not lines and args.api_key_file is None and os.environ.get(KEY_VARIABLE):
        lines.append(os.environ[KEY_VARIABLE])
    if args.api_key_file is not None:
        try:
            with open(args.api_key_file.expanduser(), encoding="utf-8") as file:
                check_private(args.api_key_file, os.fstat(file.fileno()))
                text = file.read()
        except (OSError, ValueError) as e:
            raise UsageError(f"--api-key-file {args.api_key_file} cannot be read: {e}") from None
        lines += [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        if not lines:
            raise UsageError(f"--api-key-file {args.api_key_file} has no key")
    return tuple(_key(number, line) for number, line in enumerate(lines, 1))


def _key(number: int, line: str) -> ApiKey:
    from mdi.serve.serve_settings import ApiKey, digest_of

    parts = line.split()
    if not 1 <= len(parts) <= 3 or len(parts[0]) < 8:
        raise UsageError(
            f"API key {number}: expected at least 8 characters without blanks, then its name and its priority"
        )
    name = parts[1] if len(parts) > 1 else f"key{number}"
    try:
        priority = int(parts[2]) if len(parts) > 2 else 0
    except ValueError:
        raise UsageError(f"API key {number}: its priority is not a whole number") from None
    if abs(priority) > PRIORITY_LIMIT:
        raise UsageError(f"API key {number}: its priority must be from {-PRIORITY_LIMIT} to {PRIORITY_LIMIT}")
    return ApiKey(digest_of(parts[0]), name, priority)


def _check_tls(cert: Path, key: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, lambda: "")
    except (OSError, ssl.SSLError) as e:
        raise UsageError(f"--tls-cert {cert} and --tls-key {key} cannot be used: {e}") from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
