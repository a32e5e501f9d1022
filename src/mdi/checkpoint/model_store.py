"""The user's models by name: one folder of them, the same from everywhere, and those in other places, used as they are.

A model of the store is a folder, `org/name`, or `org/name--Q4_K_M` for one GGUF file of many. Several processes and users may
share a store: a lock belongs to each fetch and to each change, and a model in use has a mark, whose lock ends with its process.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import mdi
from mdi.cancel import Cancel
from mdi.checkpoint.download import download, gguf_tag, is_unfinished, read_marker
from mdi.checkpoint.folder import (
    CHUNKS,
    GGUF_FOLDERS,
    GGUF_NOTE,
    checkpoints_in,
    gguf_file,
    gguf_name,
    is_later_piece,
    is_lit_dir,
    is_readable_hf,
    is_repo_id,
    weight_files,
)
from mdi.errors import Code, MdiError, StoreError, UsageError
from mdi.files import lock_file, replacing
from mdi.spec.cluster import what_is_there
from mdi.spec.settings_file import parse_json

VARIABLE = "MDI_STORE"
STATE = ".mdi"  # in the store: locks, marks, what is not finished
LAST = "last"
EMBEDDED = "nano-llama"
TAG = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
N_LISTED = 8
POLL_S = 0.5


def default_store() -> Path:
    """MDI_STORE, else models/ in the user's data folder."""
    from platformdirs import user_data_path

    named = os.environ.get(VARIABLE)
    return Path(named).expanduser().absolute() if named else user_data_path("mdi-llm", appauthor=False) / "models"


def earlier_folders() -> list[Path]:
    """Where earlier versions kept models: src/checkpoints of a checkout, else checkpoints/ of the present folder."""
    src = Path(__file__).resolve().parents[2]
    return [(src if (src / "starter.py").is_file() else Path.cwd()) / "checkpoints"]


def hub_cache() -> Path:
    """The folder in which the hub's own programs keep models; as their documents say, so that none of them need be imported."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HF_HOME") or caches / "huggingface").expanduser() / "hub"


def split_name(name: str) -> tuple[str, str | None]:
    """The repository and the tag of "org/name:Q4_K_M"; None without a tag."""
    repo, colon, tag = name.partition(":")
    return repo, tag if colon else None


def embedded_model() -> Path | None:
    """The folder of the small model that comes along with the installed package, or with a clone."""
    package = Path(mdi.__file__).parent
    folders = (package / EMBEDDED, package.parents[1] / "assets" / EMBEDDED)
    return next((folder for folder in folders if folder.is_dir()), None)


def is_model_name(name: str) -> bool:
    """Whether this can be a name on the hub, with or without a tag."""
    repo, tag = split_name(name)
    return is_repo_id(repo) and (tag is None or TAG.fullmatch(tag) is not None)


@dataclass(frozen=True)
class StoredModel:
    """A model that is ready.

    Attributes:
        name: as commands take it.
        folder: its files.
        home: the store, or another place in which it is.
        is_own: whether `mdi rm` may remove it.
        gguf: the GGUF file, or the first of several, that has its weights.
        is_whole: false of a download that has not come to its end, and of a GGUF file that was removed.
    """

    name: str
    folder: Path
    home: Path
    is_own: bool = True
    gguf: Path | None = None
    is_whole: bool = True

    @property
    def files(self) -> list[Path]:
        """All its files, those of chunks too."""
        if self.gguf is not None and not self.is_own:
            tag = gguf_tag(self.gguf.name)
            return [path for path in self.gguf.parent.glob("*.gguf") if gguf_tag(path.name) == tag and path.is_file()]
        inside = [path for path in self.folder.rglob("*") if path.is_file()]
        is_outside = self.gguf is not None and not self.gguf.is_relative_to(self.folder) and self.gguf.is_file()
        return [*inside, self.gguf] if self.gguf is not None and is_outside else inside

    @property
    def is_gone(self) -> bool:
        """Whether its weights were a GGUF file that is not there any more, or that its folder may not name."""
        has_note = (self.folder / GGUF_NOTE).is_file()
        return (has_note or self.gguf is not None) and (self.gguf is None or not self.gguf.is_file())

    @property
    def format(self) -> str:
        if self.is_gone:
            return "file is gone"
        if not self.is_whole:
            return "not complete"
        if self.gguf is not None:
            return f"GGUF {gguf_tag(self.gguf.name)}"
        return "LitGPT" if is_lit_dir(self.folder) else "Hugging Face" if weight_files(self.folder) else "chunks"

    @property
    def licence(self) -> str:
        """As the hub says it; "" where it is not known."""
        return str(read_marker(self.folder).get("licence") or _card_licence(self.folder))


@dataclass(frozen=True)
class Mark:
    """A process that has a model loaded.

    Attributes:
        command: as it was called, like "mdi serve".
        nodes: names and addresses of those that compute.
    """

    path: Path
    pid: int
    host: str
    command: str
    nodes: tuple[str, ...]

    def __str__(self) -> str:
        where = f"process {self.pid}" + ("" if self.host == socket.gethostname() else f" of {self.host}")
        return f"{self.command} ({where})" + (f" on {', '.join(self.nodes)}" if self.nodes else "")


class ModelStore:
    """Args:
    folder: the store, which need not exist; None: the default one, with the models in the folders of earlier versions.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_store() if folder is None else folder.expanduser().absolute()
        self.others = (
            [other for other in earlier_folders() if other != self.folder] if self.folder == default_store() else []
        )

    # Models

    def models(self) -> list[StoredModel]:
        """Models that are ready, those of the store first; of several with one name, the first."""
        return [model for model in self.all() if model.is_whole]

    def all(self) -> list[StoredModel]:
        """All models, also those that are not downloaded to their end."""
        found: dict[str, StoredModel] = {}
        for home in (self.folder, *self.others):
            unfinished = [path.parents[2] for path in home.glob("*/*/.cache/huggingface/download")]
            places = {*checkpoints_in(home), *(str(folder.relative_to(home)) for folder in unfinished)}
            noted = Counter(_noted_name(home, home / place) for place in places)
            for place in sorted(places):
                folder = home / place
                if not place.startswith(STATE):
                    name = folder.name if place == "." else Path(place).as_posix().replace("--", ":")
                    if (noted_name := _noted_name(home, folder)) is not None and noted[noted_name] == 1:
                        name = noted_name
                    model = StoredModel(name, folder, home, gguf=gguf_file(folder), is_whole=is_whole(folder))
                    found.setdefault(name, model)
        for model in self._cached():
            found.setdefault(model.name, model)
        return list(found.values())

    def find(self, name: str) -> StoredModel | None:
        """The model of that name; its organisation, or the only tag that is there, may be left out."""
        every, wanted = self.all(), name.casefold()
        models = [model for model in every if model.is_whole]
        shortened: tuple[Callable[[StoredModel], str], ...] = (
            lambda model: model.name,
            lambda model: split_name(model.name)[0],
            lambda model: _without_org(model.name),
            lambda model: _without_org(split_name(model.name)[0]),
            lambda model: "" if model.gguf is None else gguf_name(model.gguf),
            lambda model: f"{model.folder.parent.name}/{model.folder.name}",  # as earlier versions called GGUF files
        )
        for shorten in shortened:
            fitting = [model for model in models if shorten(model).casefold() == wanted]
            if len(fitting) == 1:
                return fitting[0]
            if fitting:
                names = ", ".join(model.name for model in fitting)
                raise UsageError(f"{name} may be one of {names}: give the whole name")
        if (gone := next((one for one in every if one.name.casefold() == wanted and one.is_gone), None)) is not None:
            file = gone.gguf or gone.folder / GGUF_NOTE
            raise UsageError(
                f"{name}: its file {file} is gone: put it there again, or `mdi rm {name}` removes the name"
            )
        return None

    def folder_of(self, model: StoredModel) -> Path:
        """A folder that a node can be given. Raises CheckpointError."""
        if model.gguf is None:
            return model.folder
        from mdi.checkpoint.ggufsource import current, gguf_directory

        if (model.folder / GGUF_NOTE).is_file():
            return current(model.folder)
        return gguf_directory(model.gguf, self.folder)

    def describe_missing(self, name: str) -> str:
        """Say that there is no such model, and what is meant, or there."""
        path, names = Path(name).expanduser(), [*(model.name for model in self.models()), EMBEDDED]
        if path.is_absolute() or name.startswith(".") or len(path.parts) > 2 or path.suffix == ".gguf":
            return f"{name}: no such file or directory ({what_is_there(path)})"
        for model in self.all():
            is_meant = name.casefold() in (model.name.casefold(), _without_org(model.name).casefold())
            if is_meant and not model.is_whole and not model.is_gone:
                return f"{model.name} is not complete: `mdi pull {model.name}` fetches the rest"
        short = {_without_org(known): known for known in names}
        near = difflib.get_close_matches(name, names, 1) or difflib.get_close_matches(name, short, 1)
        if near:
            return f"there is no model {name} here: is {short.get(near[0], near[0])} meant?"
        return f"there is no model {name} here; {self.describe()}"

    def describe(self) -> str:
        """The names of the models, in one line."""
        names = [model.name for model in self.models()]
        if not names:
            return f"{self.folder} has no model yet: `mdi pull org/name` fetches one; {EMBEDDED} is here without"
        more = f" and {len(names) - N_LISTED} more" if len(names) > N_LISTED else ""
        return f"there are {', '.join(names[:N_LISTED])}{more}"

    def fetch(
        self, name: str, token: str | None = None, revision: str | None = None, progress: bool = True,
        say: Callable[[str], None] = lambda line: None, cancel: Cancel | None = None,
    ) -> Path:  # fmt: skip
        """The folder of a model on the hub, downloaded unless it is there. One process at a time fetches one model.

        Args:
            name: "org/name", or "org/name:Q4_K_M" for one GGUF file of many.
            say: called with a line while it waits.
            cancel: ends it, with its error.

        Raises:
            DownloadError: see `download`.
            StoreError: the store cannot be written.
        """
        from mdi.checkpoint.ggufsource import gguf_directory

        repo, tag = split_name(name)
        cancel = cancel or Cancel()
        with self._locked(quote(repo, safe=""), cancel, lambda: say(f"another process fetches {repo}; waiting for it")):
            folder = download(repo, self.folder, token, revision, progress, tag, cancel)
            files = sorted(folder.rglob("*.gguf"))
            if files and not (folder / GGUF_NOTE).is_file():
                gguf_directory(files[0], self.folder, folder)
        return folder

    def remove(self, model: StoredModel) -> None:
        """Raises StoreError: it is loaded, or cannot be removed."""
        state = model.home / STATE
        with self._locked("store", Cancel(), state=state):
            for mark in self.marks(model):
                raise StoreError(f"{model.name} is loaded: {mark}; end that first", code=Code.LOADED)
            condemned = state / f"removed-{secrets.token_hex(4)}"
            try:
                os.replace(model.folder, condemned)
            except OSError as e:
                raise StoreError(f"{model.folder} cannot be removed: {e.strerror or e}") from None
            with contextlib.suppress(OSError):  # there are other models of the same organisation
                model.folder.parent.rmdir()
        shutil.rmtree(condemned, ignore_errors=True)

    # Marks of models in use

    def marks(self, model: StoredModel) -> list[Mark]:
        """Processes that have it loaded."""
        paths = {path.resolve() for path in (model.folder, model.gguf) if path is not None}
        return [
            mark for mark in self._all_marks()
            if any(mark.path == path or mark.path.is_relative_to(path) for path in paths)
        ]  # fmt: skip

    def _all_marks(self) -> Iterator[Mark]:
        for home in (self.folder, *self.others):
            for path in sorted((home / STATE).glob("use-*")):
                if (mark := _read_mark(path)) is not None:
                    yield mark

    # The last model

    def remember(self, name: str) -> None:
        """Keep the name as this user's last one; a store that cannot be written keeps none."""
        with contextlib.suppress(OSError, StoreError), replacing(self._last, StoreError, makes_folder=True) as file:
            file.write(json.dumps({"name": name}).encode())

    def last(self) -> str | None:
        """The model that this user used last; else the only one that there is."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(parse_json(self._last.read_bytes())["name"])
        models = self.models()
        return models[0].name if len(models) == 1 else None

    @property
    def _last(self) -> Path:
        return self.folder / STATE / f"{LAST}-{os.getuid() if hasattr(os, 'getuid') else 0}.json"

    # Places and locks

    def _cached(self) -> Iterator[StoredModel]:
        """Whole models in the hub's own cache: of the main branch, else of the newest commit."""
        cache = hub_cache()
        for home in sorted(cache.glob("models--*--*")) if cache.is_dir() else ():
            with contextlib.suppress(OSError, MdiError):
                snapshots = sorted((home / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime)
                main = home / "refs" / "main"
                if main.is_file():
                    snapshots.append(home / "snapshots" / main.read_text(encoding="utf-8").strip())
                folder, name = snapshots[-1], home.name[len("models--") :].replace("--", "/", 1)
                if is_readable_hf(folder) and is_whole(folder):
                    yield StoredModel(name, folder, cache, is_own=False)
                for file in sorted(folder.rglob("*.gguf")):
                    if not is_later_piece(file):
                        yield StoredModel(f"{name}:{gguf_tag(file.name)}", folder, cache, False, file, file.is_file())

    def changing(self) -> contextlib.AbstractContextManager[None]:
        """Within: no other process adds or removes a model, or marks one. Raises StoreError: the store cannot be written."""
        return self._locked("store", Cancel())

    @contextlib.contextmanager
    def _locked(
        self, what: str, cancel: Cancel, on_wait: Callable[[], None] = lambda: None, state: Path | None = None
    ) -> Iterator[None]:  # fmt: skip
        """One process at a time; the lock ends with its process. Raises StoreError: the store cannot be written."""
        state = state or self.folder / STATE
        try:
            make_state(state)
            file = os.open(state / f"{what}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as e:
            raise StoreError(
                f"{state.parent} cannot be written ({e.strerror or e}): choose another folder with --store, or {VARIABLE}",
                code=Code.STORE,
            ) from None
        try:
            if not lock_file(file):
                on_wait()
                while not lock_file(file):
                    cancel.wait(POLL_S)
            yield
        finally:
            os.close(file)


def make_state(state: Path) -> None:
    """Make the folder of locks and marks; who may write the store may write it. Raises OSError."""
    if not state.is_dir():
        state.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            state.chmod(state.parent.stat().st_mode & 0o3777)


class InUse:
    """The mark of a model that this process has loaded, from here to `close`; nothing where no mark can be written.

    Args:
        path: the folder of the model, or a file in it. The mark is kept in the store that has it, else in the default one.

    Raises:
        StoreError: the model has been removed meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        homes = [default_store(), *earlier_folders()]
        stores = (home for home in self._path.parents if (home / STATE).is_dir() or home in homes)
        state = next(stores, homes[0]) / STATE
        self._file: int | None = None
        self._mark = state / f"use-{os.getpid()}-{secrets.token_hex(4)}"
        with contextlib.suppress(OSError, StoreError), ModelStore()._locked("store", Cancel(), state=state):
            self._file = os.open(self._mark, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            lock_file(self._file)
            self.show(())
        if not path.exists():
            self.close()
            raise StoreError(f"{path} has been removed", code=Code.REMOVED)

    def show(self, nodes: Sequence[str]) -> None:
        """Say which nodes compute."""
        if self._file is None:
            return
        program = Path(sys.argv[0]).name
        command = " ".join(["mdi", *sys.argv[1:2]]) if program in ("mdi", "__main__.py") else program
        data = {
            "path": str(self._path), "pid": os.getpid(), "host": socket.gethostname(), "command": command,
            "nodes": list(nodes), "since": time.time(),
        }  # fmt: skip
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(data).encode(), 0)

    def close(self) -> None:
        """Harmless if repeated."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                self._mark.unlink()
            os.close(file)


def _read_mark(path: Path) -> Mark | None:
    """None of a process that has ended; its mark is removed."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        if lock_file(file, is_shared=True):  # nobody has it
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        found = parse_json(os.read(file, 1 << 16))
        return Mark(
            Path(found["path"]),
            int(found["pid"]),
            str(found["host"]),
            str(found["command"]),
            tuple(map(str, found["nodes"])),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(file)


def is_whole(folder: Path) -> bool:
    """Whether a folder has all files of its download, and of its weights in Hugging Face's form, or its GGUF file.

    Others are whole when made.
    """
    if (folder / CHUNKS).is_dir():
        return True
    if (folder / GGUF_NOTE).is_file():
        return (file := gguf_file(folder)) is not None and file.is_file()
    if is_unfinished(folder):
        return False
    if is_lit_dir(folder):
        return True
    try:
        files = weight_files(folder)
        return bool(files) and all(file.is_file() for file in files)
    except MdiError:
        return False


def _noted_name(home: Path, folder: Path) -> str | None:
    """The name of a GGUF file that lies elsewhere, by its folder in a store. The folder's own name has a hash as well."""
    file = gguf_file(folder) if folder.parent == home / GGUF_FOLDERS else None
    return None if file is None else gguf_name(file)


def _without_org(name: str) -> str:
    return name.rpartition("/")[2]


def _card_licence(folder: Path) -> str:
    """From the head of the model's card, where it came along."""
    try:
        with open(folder / "README.md", encoding="utf-8", errors="replace") as file:
            head = file.read(8192)
    except OSError:
        return ""
    match = re.match(r"---\n.*?^license:[ \t]*([\w.-]+)", head, re.DOTALL | re.MULTILINE)
    return match[1] if match else ""
