"""Starts scripts with --help, each in a copy of this process, and prints what they say as a JSON object: script -> text.

    python start_each.py SCRIPT...

The copies share what takes long to import. Modules of the program are among it, but a copy gets one only where its own import
finds the file of it: each script has to put the program on the path by itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import re
import resource
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ("mdi", "mdi_tools", "mdi_training")
IMPORTS = re.compile(rf"^(?:from|import) ((?:{'|'.join(PROGRAM)})\b[\w.]*)", re.MULTILINE)
LIMIT_S = 60  # of processor time: a script that does not know --help would begin to measure


class Loaded(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of the program that were loaded before, for an import that finds the same file."""

    def __init__(self, scripts: Sequence[str]) -> None:
        path = list(sys.path)
        sys.path.insert(0, str(ROOT / "src"))
        texts = [
            file.read_text(encoding="utf-8")
            for folder in {Path(s).parent for s in scripts}
            for file in folder.rglob("*.py")
        ]
        for name in sorted({name for text in texts for name in IMPORTS.findall(text)}):
            with contextlib.suppress(ImportError):  # the script will say it
                importlib.import_module(name)
        sys.path[:] = path
        self._modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in PROGRAM}
        self._files = {name: module.__spec__.origin for name, module in self._modules.items() if module.__spec__}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._files:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin != self._files[name]:
            return None
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has been."""


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

    sys.meta_path.insert(0, Loaded(scripts))
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
