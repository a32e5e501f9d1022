"""Processes that begin with everything imported: a server imports once, and forks one child for each that is asked for.

A new interpreter imports torch and litgpt for seconds, which most tests of killed and limited processes need only as they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"
# Nothing but imports may happen before the fork: the first computation starts threads, which a child would not have.
SERVER = """
import importlib, json, os, sys, traceback
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    asked = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for fd, path in ((1, asked["out"]), (2, asked["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["-c", *asked["argv"]]
        status = 1
        try:
            exec(asked["code"], {"__name__": "__main__"})
            status = 0
        except SystemExit as e:
            status = e.code if isinstance(e.code, int) else int(e.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])), flush=True)
os._exit(0)
"""


class ForkedChildren:
    """Runs Python code in one child process after the other. As a context manager it ends the server.

    Args:
        modules: that each child has imported.
        python: the interpreter.
        environment: variables of the children besides those of this process.
    """

    def __init__(self, *modules: str, python: Path = Path(sys.executable), **environment: str) -> None:
        self._server = subprocess.Popen(
            [str(python), "-c", SERVER, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SRC), **environment},
        )  # fmt: skip

    def run(self, code: str, argv: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """As subprocess.run would; what the child prints goes through files of `folder`."""
        assert self._server.stdin is not None and self._server.stdout is not None
        out, err = folder / "stdout", folder / "stderr"
        asked = {"code": code, "argv": list(argv), "out": str(out), "err": str(err)}
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        assert (line := self._server.stdout.readline()), "the server ended"
        status = int(line)
        return subprocess.CompletedProcess(list(argv), status, out.read_text(), err.read_text())

    def __enter__(self) -> ForkedChildren:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate(timeout=60)
