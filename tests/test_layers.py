"""Imports: launchers have only the command line, nothing is unpickled, and what must start quickly has no torch.

The layers of the packages stand in pyproject.toml, for `make lint`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from mdi.model.plain import NAME_WORDS, ModelConfig

SRC = Path(__file__).resolve().parents[1] / "src"

# The root itself holds the version and nothing else.
ROOT = "version"

LIGHT = [
    "mdi",
    "mdi.errors",
    "mdi.spec.cluster",
    "mdi.kernels.build",
    "mdi.kernels.library",
    "mdi.spec.settings_file",
    "mdi.net.wire",
    "mdi.net.hello",
    "mdi.net.link",
    "mdi.control.messages",
    "mdi.control.client",
    "mdi.engine.scheduler",
    "mdi_tools.process_memory",
    "mdi_tools.token_times",
    "mdi.placement.profile",
    "mdi.kernels.weight_formats",
    "mdi.run.local",
    "mdi.serve.api",
    "mdi.serve.process",
    "mdi.text.limited",
]


# What a node without torch uses to get at its weights.
ONLY_NUMPY = [f"mdi.checkpoint.{name}" for name in ("chunks", "records", "shapes", "source", "store", "weightfile")]


def modules() -> list[Path]:
    return sorted(SRC.glob("mdi*/**/*.py"))


def layer_of(module: str) -> str:
    name = (module.split(".") + [ROOT])[1]
    return name


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The whole syntax tree of a file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Full names of everything that a file imports, wherever in it, and the line."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package[: len(package) - node.level + 1], node.module or ""]) if node.level else node.module
            )
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def launchers() -> list[Path]:
    return sorted(SRC.glob("*.py"))


def test_there_are_launchers() -> None:
    assert {"starter", "secondary", "local_ring", "sample", "chat", "train"} <= {path.stem for path in launchers()}


@pytest.mark.parametrize("path", launchers(), ids=lambda p: p.stem)
def test_a_launcher_only_calls_the_command_line(path: Path) -> None:
    ours = {name for name, _ in imports(path) if name.split(".")[0] == "mdi"}
    assert ours and {layer_of(name) for name in ours} == {"cli"}
    assert len(path.read_text().splitlines()) <= 20


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", [*modules(), *launchers()], ids=lambda p: str(p.relative_to(SRC)))
def test_nothing_is_unpickled_or_executed(path: Path) -> None:
    for name, line in imports(path):
        unsafe = ("pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
        assert name.split(".")[0] not in unsafe, f"{path.name}:{line} imports {name}"
    for function, call in calls(path):
        where = f"{path.name}:{call.lineno} {function}"
        if function in ("torch.load", "load_checkpoint"):
            safe = [k.value for k in call.keywords if k.arg == "weights_only"]
            assert len(safe) == 1 and isinstance(safe[0], ast.Constant) and safe[0].value is True, where
        assert function not in ("eval", "exec", "__import__", "yaml.load", "yaml.unsafe_load", "os.system"), where
        assert not any(k.arg == "shell" for k in call.keywords), where
        for keyword in call.keywords:
            assert not (keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"), where


HEAVY = ("torch", "litgpt", "matplotlib", "cherrypy", "transformers", "numpy", "cryptography")
OF_NODES, OF_CLIENTS = {"cherrypy", "cheroot"}, {"starlette", "uvicorn"}  # servers for nodes, and for OpenAI's API


def heavy_after(code: str, heavy: Iterable[str] = HEAVY) -> set[str]:
    """Which of the heavy libraries a fresh interpreter has loaded after `code`."""
    code += "\nimport sys; print('HEAVY', *sorted({m.split('.')[0] for m in sys.modules} & set(sys.argv[1:])))"
    done = subprocess.run(
        [sys.executable, "-c", code, *heavy], cwd=SRC, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("HEAVY")]
    return set(lines[-1].split()[1:])


def test_light_modules_do_not_import_torch() -> None:
    assert not heavy_after("\n".join(f"import {name}" for name in LIGHT))


def test_files_of_weights_need_no_torch() -> None:
    assert heavy_after("\n".join(f"import {name}" for name in ONLY_NUMPY)) == {"numpy"}


def test_nodes_without_torch_can_be_imported() -> None:
    names = ("mdi.node.secondary", "mdi.placement.kernel_bench", "mdi.engine.rows", "mdi.run.run")
    assert heavy_after("\n".join(f"import {name}" for name in names)) == {"numpy", "cherrypy"}


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("mdi.serve.api", "mdi.serve.page"), OF_CLIENTS),
        (
            ("mdi.serve.host", "mdi.serve.backend", "mdi.serve.process", "mdi.serve.backend", "mdi.serve.snapshot"),
            OF_NODES,
        ),
        (
            ("mdi.node.secondary", "mdi.run.local", "mdi.run.run", "mdi.control.discovery", "mdi.host.doctor"),
            OF_NODES,
        ),
    ],
    ids=["api", "engine of serve", "node"],
)
def test_no_process_loads_two_http_servers(names: tuple[str, ...], wanted: set[str]) -> None:
    """At once; what is imported later is a contract of import-linter."""
    code = "\n".join(f"import {name}" for name in names)
    assert heavy_after(code, OF_NODES | OF_CLIENTS) == wanted


def test_command_lines_do_not_import_torch() -> None:
    names = [module_name(path) for path in modules() if layer_of(module_name(path)) == "cli"]
    assert "mdi.cli" in names
    assert not heavy_after("\n".join(f"import {name}" for name in names))


@pytest.mark.parametrize("path", launchers(), ids=lambda p: p.stem)
def test_help_does_not_import_torch(path: Path) -> None:
    code = (
        "import runpy, sys\nargv, sys.argv = sys.argv, [sys.argv[0], '--help']\n"
        f"try:\n    runpy.run_path({path.name!r}, run_name='__main__')\n"
        "except SystemExit as e:\n    assert not e.code, e.code\nsys.argv = argv"
    )
    assert not heavy_after(code)


def test_a_models_config_is_read_without_torch() -> None:
    path = SRC.parent / "assets" / "nano-llama" / "model_config.yaml"
    code = (
        "import sys; from pathlib import Path; from mdi.checkpoint.shapes import read_config; "
        f"config = read_config(Path({str(path)!r})); "
        "print(config.n_layer, 'torch' in sys.modules, 'litgpt' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=SRC)
    assert done.stdout.split() == ["8", "False", "False"]


# What a ModelConfig has, and nothing else that is read by a text.
FIELDS = {entry.name for entry in dataclasses.fields(ModelConfig)} - {"name", "bias", "vocab_size", "alibi"}
# Modules that read or write another form of it, or a file that is called a config as well.
BORDERS = {
    "mdi.model.plain": "makes the class from its plain form, and knows what litgpt reads in names",
    "mdi.spec.limits": "checks the plain form",
    "mdi.families.config_json": "reads config.json",
    "mdi.families.deepseek": "reads config.json",
    "mdi.families.gemma": "reads config.json",
    "mdi.families.gemma4": "reads config.json, and fields of GGUF files",
    "mdi.families.glm": "reads config.json",
    "mdi.families.qwen": "reads config.json",
    "mdi.families.qwen_next": "reads config.json",
    "mdi.checkpoint.folder": "looks for one number in files of which nothing is known yet",
    "mdi.checkpoint.quantized": "reads config.json",
    "mdi.text.tokenizer": "reads tokenizer_config.json",
    "mdi.text.templates": "reads tokenizer_config.json",
    "mdi.cli.plan": "looks into litgpt's table",
}


def texts_for_fields(tree: Iterable[ast.AST]) -> list[tuple[str, int]]:
    """Where a config is read by a text instead of a field, or a family is looked for in a name; with the line."""
    found = []
    for node in tree:
        owner, text = None, None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            owner, text = node.value, node.slice
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
        ):
            owner, text = node.func.value, node.args[0]
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and node.left.value in NAME_WORDS:
            is_search = isinstance(node.ops[0], (ast.In, ast.NotIn))
            found += [(ast.unparse(node), node.lineno)] * is_search
        if owner is not None and isinstance(text, ast.Constant) and isinstance(text.value, str):
            name = ast.unparse(owner).rpartition(".")[2].strip("_")
            is_config = name.endswith("config") and name != "hf_config"  # a field itself
            if is_config or text.value in FIELDS:
                found.append((ast.unparse(node), node.lineno))
    return found


@pytest.mark.parametrize(
    "code",
    [
        "config['name']", "self._config['x']", "model.config.get('x')", "c['n_embd']", "c.get('norm_eps', 1e-5)",
        "f\"{config['x']}\"", "'Gemma' in name", "'OLMo' not in config.name",
    ],
)  # fmt: skip
def test_texts_for_fields_are_found(code: str) -> None:
    assert texts_for_fields(ast.walk(ast.parse(code)))


@pytest.mark.parametrize("code", ["config.n_embd", "own['n_embd'] = 1", "row['name']", "config[0]", "'Gemma' == x"])
def test_other_texts_are_left_alone(code: str) -> None:
    assert not texts_for_fields(ast.walk(ast.parse(code)))


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_a_models_config_is_read_by_its_fields(path: Path) -> None:
    """Everything reads a ModelConfig: its plain form is only for files, messages, the hash and litgpt."""
    found = texts_for_fields(nodes_of(path))
    if module_name(path) in BORDERS:
        assert found, "this module needs no exception any more"
    else:
        assert not found
