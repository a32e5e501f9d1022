"""Serve models to programs and people: OpenAI's and Anthropic's APIs, and with --ollama-port Ollama's, over a ring of nodes.

examples:
  mdi serve Qwen/Qwen3-0.6B --open              on this machine alone; its page is opened in the browser
  mdi serve model.Q4_K_M.gguf --nodes 3         a ring of three processes here
  mdi serve org/name --machines 3               on three machines: prints a line for the others
  mdi serve org/name --host 0.0.0.0 --api-key a-long-secret
      also for phones and other machines in the network, with this key: http://ADDRESS:8000

Programs that use OpenAI's API need http://127.0.0.1:8000/v1 as their base URL, those that use Anthropic's need
http://127.0.0.1:8000. Those that know Ollama's alone need --ollama-port 11434, and then http://127.0.0.1:11434. Without
--sequence-length, a text may have up to 8,192 tokens, or as many as the model allows. Ctrl-C or SIGTERM ends the server when
the texts under way are finished, or after 15 seconds.
"""

from __future__ import annotations

import logging
import os
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mdi.cancel import Cancel
from mdi.spec.combinations import OWN_RING, facts_of, refuse
from mdi.spec.options import ACCESS, COMMON, DRAFT, MODEL, PARALLEL, RING, SERVER, Options
from mdi.spec.parser import Parser

if TYPE_CHECKING:
    from mdi.cli.discover import Discovery
    from mdi.run.nodes import NodeSource
    from mdi.run.run import Run
    from mdi.serve.catalog import Catalog
    from mdi.serve.machines import Machines
    from mdi.serve.process import ApiProcess, ServeSettings
    from mdi.spec.cluster import ClusterConfig

logger = logging.getLogger("mdi")


FIRST = (
    "--quantize", "--memory", "--sequence-length", "--nodes", "--key",
    "--machines", "--host", "--port", "--api-key", "--ollama-port", "--max-running", "--verb",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    parser.options("model", *MODEL, quantize={"default": "auto"})
    parser.options(
        "nodes", "nodes", "nodes_config", "swarm", "machines", "addr", "dial_port", "no_invite", "devices", *ACCESS, *RING,
        *PARALLEL, *DRAFT,
        nodes={"help": "a ring of N processes on this machine"},
        nodes_config={"help": "nodes file: a ring of these nodes"},
        devices={"help": "with --nodes: device of each node, starter first"},
    )  # fmt: skip
    parser.options("API", *SERVER, "trace")
    parser.set_defaults(prompt_style="none")
    parser.options(None, *COMMON)


def run(options: Options, cancel: Cancel) -> int:
    from mdi.cli.access import with_machines
    from mdi.cli.discover import Discovery
    from mdi.cli.serve_settings import serve_settings

    if options.nodes is not None:
        refuse({**facts_of(options), OWN_RING: OWN_RING}, OWN_RING)
    found = with_machines(options)
    settings = serve_settings(options)
    owners = tuple((key.name, key.digest) for key in settings.keys)
    file, digests = options.api_key_file, [key.digest for key in settings.keys]
    realm = str(file.expanduser().resolve()) if file else " ".join(sorted(digests))
    options = replace(options, key=found.key, prefix_owners=owners, prefix_realm=realm)
    with Discovery(found, cancel) as discovery:
        return _run_api(options, settings, discovery, cancel)


def _run_api(options: Options, settings: ServeSettings, discovery: Discovery, cancel: Cancel) -> int:
    """Raises MdiError."""
    from mdi.checkpoint.model_store import default_store
    from mdi.cli import Acknowledged, ignore_interrupts
    from mdi.cli.session import check_cut, on_processes, run_options, with_model

    options = with_model(options, cancel)
    check_cut(options, 1 if options.nodes is None else options.nodes)
    options = run_options(options if options.nodes is None else on_processes(options))
    models, ckpt = options.ckpt_folder or default_store(), options.ckpt
    assert ckpt is not None

    from mdi.checkpoint.adapters import adapter_names
    from mdi.serve.catalog import Catalog
    from mdi.serve.process import ApiProcess

    adapters = [one.name for one in adapter_names(options.named_adapters)]
    catalog = Catalog(models, ckpt, adapters, settings.aliases)
    api = ApiProcess(settings, models, ckpt, adapters)
    try:
        logger.info("loading %s; %s answers then", ckpt.name, api.url)
        if api.ollama_url:
            logger.info("Ollama's API: %s", api.ollama_url)
        _serve(options, api, catalog, discovery, cancel)
    except KeyboardInterrupt:
        pass
    finally:
        ignore_interrupts()
        api.close()
    logger.info("the server has ended")
    return Acknowledged(0)


def _serve(options: Options, api: ApiProcess, catalog: Catalog, discovery: Discovery, cancel: Cancel) -> None:
    """Until the API process ends, or an interrupt that has been obeyed."""
    from mdi.cli import ignore_interrupts
    from mdi.cli.session import CONTEXT_LIMIT
    from mdi.engine.recorder import SERVE_SPANS
    from mdi.errors import MdiError
    from mdi.serve.backend import Backend, handlers
    from mdi.serve.host import ModelHost
    from mdi.serve.snapshot import Snapshots

    def ready(name: str) -> None:
        is_first = name == catalog.first_name
        logger.info("ready: %s (Ctrl-C ends)" if is_first else "%s is ready, too", api.url if is_first else name)

    nodes = _nodes(options, discovery)
    if not options.n_spans:  # the page shows how long frames take on each link
        options = replace(options, n_spans=SERVE_SPANS)
    with nodes:
        host = ModelHost(
            nodes, options, catalog, options.sequence_length or CONTEXT_LIMIT, api.lines,
            _after(options), ready, cancel, options.pooling,
        )  # fmt: skip
        snapshots = Snapshots(host)
        machines = _machines(options, discovery)

        def look() -> dict[str, Any]:
            machines.look()
            return snapshots.take()

        backend = Backend(api.lines, host, handlers(host, snapshots, machines), look)
        if options.open and _has_display():
            webbrowser.open(api.url)
        try:
            host.run()
            raise MdiError("the API process has ended by itself; its last lines are above")
        except KeyboardInterrupt:
            ignore_interrupts()
            logger.info("no more requests are accepted; the server ends as soon as those under way are finished")
            api.drain()
        finally:
            ignore_interrupts()
            host.close()
            backend.close()
            machines.close()


def _has_display() -> bool:
    """Without one, a browser of text would take this terminal."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _after(options: Options) -> Callable[[Run], None] | None:
    """Write the trace of a ring that has ended: --trace keeps that of the last one."""
    from mdi.cli.output import write_trace_of

    path = options.trace
    return None if path is None else lambda node: write_trace_of(node, path)


def _machines(options: Options, discovery: Discovery) -> Machines:
    """Invitations of further machines; a ring of processes on this machine has no place for them."""
    from mdi.cli.access import free_port, open_keys, own_address
    from mdi.cli.discover import CONTROL_PORT
    from mdi.serve.machines import Machines

    keys = None if options.nodes is not None else open_keys(options)
    addr = options.addr or own_address()
    guests = None if keys is None else discovery.guests(keys)
    return Machines(keys, addr, lambda: free_port(addr, CONTROL_PORT), guests)


def _nodes(options: Options, discovery: Discovery) -> NodeSource:
    from mdi.cli.session import nodes_of, processes_of
    from mdi.run.local import LocalRing
    from mdi.spec.cluster import load_cluster, standalone

    if options.nodes is not None:
        return processes_of(options, options.nodes, LocalRing, options.cores, is_revived=True)

    def find() -> ClusterConfig:
        return load_cluster(options.nodes_config) if options.nodes_config else standalone()

    return nodes_of(options, find if options.machines is None else discovery.present_nodes, discovery)
