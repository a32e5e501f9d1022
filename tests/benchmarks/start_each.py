"""Starts scripts with --help, each in a copy of this process, and prints what they say as a JSON object: script -> text.

    python start_each.py SCRIPT...

The copies share what takes long to import, and nothing of the program: each finds that by itself.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import runpy
import sys
import traceback
from pathlib import Path

LIMIT_S = 60  # of processor time: a script that does not know --help would begin to measure


def start(script: str) -> str:
    """Its help, or why it did not print any."""
    out = io.StringIO()
    sys.argv, sys.path[0] = [script, "--help"], str(Path(script).resolve().parent)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as e:
        return out.getvalue() if not e.code else f"it ends with {e.code}"
    except BaseException:
        return traceback.format_exc()[-2000:]
    return "it has no --help"


def main(scripts: list[str]) -> None:
    import litgpt.model  # noqa: F401
    import torch  # noqa: F401

    said = {}
    for script in scripts:
        mine, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
            os.write(theirs, start(script).encode()[:60_000])
            os._exit(0)
        os.close(theirs)
        with open(mine, encoding="utf-8") as pipe:
            said[script] = pipe.read()
        if status := os.waitpid(pid, 0)[1]:
            said[script] = f"it ends with status {status}"
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1:])
