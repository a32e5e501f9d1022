"""The API's settings, from the options of `mdi serve`: keys, certificate, hosts."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.errors import UsageError
from mdi.spec.options import Options

if TYPE_CHECKING:
    from mdi.serve.process import ApiKey, ServeSettings

KEY_VARIABLE = "MDI_API_KEY"
PRIORITY_LIMIT = 1000
LIMITS = ("beams", "beam_tokens", "texts", "minute_tokens", "day_tokens")  # of a key; see ApiKey


def serve_settings(options: Options) -> ServeSettings:
    """Raises UsageError."""
    from mdi.serve.process import ServeSettings

    if options.tls_cert is not None and options.tls_key is not None:
        _check_tls(options.tls_cert, options.tls_key)
    keys = _keys(options)
    if not keys and not options.insecure and not _is_loopback(options.host):
        raise UsageError(
            f"--host {options.host} lets everybody in the network use the nodes: give --api-key-file FILE (or --insecure, if "
            "everybody may)"
        )
    if options.ollama_port and options.ollama_port == options.port:
        raise UsageError(f"--ollama-port {options.ollama_port} is --port, too")
    return ServeSettings(
        host=options.host,
        port=options.port,
        keys=keys,
        tls_cert=None if options.tls_cert is None else str(options.tls_cert),
        tls_key=None if options.tls_key is None else str(options.tls_key),
        hosts=options.allow_host,
        origins=options.allow_origin,
        max_running=options.max_running,
        max_waiting=options.queue,
        aliases=_aliases(options.alias),
        keep_alive_s=options.keep_alive,
        tool_parser=options.tool_parser or "",
        ollama_host=options.host if keys or _is_loopback(options.host) else "127.0.0.1",
        ollama_port=options.ollama_port,
    )


def _aliases(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for one in given:
        pattern, _, name = one.partition("=")
        if not pattern or not name:
            raise UsageError(f"--alias {one}: expected PATTERN=NAME, such as 'claude-*=org/model'")
        found[pattern] = name
    return found


def _keys(options: Options) -> tuple[ApiKey, ...]:
    """Of the flags, the file and the environment."""
    from mdi.net.keys import check_private

    lines = [*options.api_key]
    if not lines and options.api_key_file is None and os.environ.get(KEY_VARIABLE):
        lines.append(os.environ[KEY_VARIABLE])
    if options.api_key_file is not None:
        try:
            with open(options.api_key_file.expanduser(), encoding="utf-8") as file:
                check_private(options.api_key_file, os.fstat(file.fileno()))
                text = file.read()
        except (OSError, ValueError) as e:
            raise UsageError(f"--api-key-file {options.api_key_file} cannot be read: {e}") from None
        lines += [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        if not lines:
            raise UsageError(f"--api-key-file {options.api_key_file} has no key")
    return tuple(read_key(number, line) for number, line in enumerate(lines, 1))


def read_key(number: int, line: str) -> ApiKey:
    from mdi.serve.process import ROLES, ApiKey, digest_of

    parts = line.split()
    limits = dict(part.split("=", 1) for part in parts[1:] if part.startswith(tuple(f"{name}=" for name in LIMITS)))
    parts = [part for part in parts if part not in {f"{name}={value}" for name, value in limits.items()}]
    if not all(value.isascii() and value.isdigit() and len(value) < 10 for value in limits.values()):
        raise UsageError(
            f"API key {number}: expected a whole number behind {' and '.join(f'{name}=' for name in limits)}"
        )
    role = parts.pop() if len(parts) > 1 and parts[-1] in ROLES else "user"
    if not parts or len(parts[0]) < 8:
        raise UsageError(f"API key {number}: expected at least 8 characters without blanks")
    if len(parts) > 3:
        raise UsageError(
            f"API key {number}: expected the key, its name, its priority, its limits "
            f"({' and '.join(f'{limit}=N' for limit in LIMITS)}) and its role ({' or '.join(ROLES)}), in this order"
        )
    name = parts[1] if len(parts) > 1 else f"key{number}"
    try:
        priority = int(parts[2]) if len(parts) > 2 else 0
    except ValueError:
        raise UsageError(f"API key {number}: its priority is not a whole number") from None
    if abs(priority) > PRIORITY_LIMIT:
        raise UsageError(f"API key {number}: its priority must be from {-PRIORITY_LIMIT} to {PRIORITY_LIMIT}")
    key = ApiKey(digest_of(parts[0]), name, priority, role)
    own: dict[str, Any] = {name: int(value) for name, value in limits.items()}
    return replace(key, **own)


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
