"""Documents name what is there: every one is found from the README, and no link leads nowhere."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest

from flag_tables import WITHOUT_TABLE, with_tables
from mdi.cli import COMMANDS, parser_of
from mdi.families.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "old").glob("*.md"),
    *ROOT.glob("assets/*/*.md"),
]


def anchors(path: Path) -> set[str]:
    """Names that headings get."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        found = path.parent / name if name else path
        assert found.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{path.name}: {target}"


NAMING = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "README.md",
    *(ROOT / "docs" / n for n in ("architecture.md",)),
]


@pytest.mark.parametrize("path", NAMING, ids=lambda path: path.name)
def test_files_that_a_document_names_are_there(path: Path) -> None:
    """`node/starter.py` is a file of the package, `old/gpt/families.py` one of the repository, `plan.py` a launcher."""
    for name in re.findall(r"`([\w./-]+\.(?:py|cpp|h|md|toml|yml))`", path.read_text(encoding="utf-8")):
        folders = (ROOT / "src" / "mdi", ROOT / "src", ROOT, path.parent)
        assert any((folder / name).exists() for folder in folders), f"{path.name} names {name}"


@pytest.mark.parametrize("path", [ROOT / "docs" / "architecture.md"], ids=lambda path: path.name)
def test_what_a_file_is_said_to_have_is_in_it(path: Path) -> None:
    """`TcpRing` (`net/ring.py`): the file has such a class or function."""
    found = re.findall(r"`(\w+)` \(`([\w/]+\.py)`\)", path.read_text(encoding="utf-8"))
    assert len(found) > 8
    for name, file in found:
        text = (ROOT / "src" / "mdi" / file).read_text(encoding="utf-8")
        assert re.search(rf"^(class|def) {name}\b|^{name} = ", text, re.MULTILINE), f"{file} has no {name}"


@pytest.mark.parametrize("path", [*(ROOT / "docs").glob("*.md")], ids=lambda path: path.name)
def test_every_document_is_linked_from_the_readme(path: Path) -> None:
    assert f"](docs/{path.name})" in (ROOT / "README.md").read_text(encoding="utf-8")


MOST_LINES = {"README.md": 150, "benchmarks/RESULTS.md": 500, "docs/log.md": 300}
MOST_LINES_OF_DOCS, LONGEST_LINE = 4200, 150
PROSE = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "RESULTS.md"]


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_document_is_not_longer_than_people_read(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= MOST_LINES[name]


def test_all_documents_are_not_longer_than_people_read() -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "docs").glob("*.md"))
    assert lines <= MOST_LINES_OF_DOCS


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_lines_of_prose_are_short(path: Path) -> None:
    """Tables and code have lines as long as they need."""
    prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > LONGEST_LINE and not line.startswith(("|", "!["))] == []


@pytest.mark.parametrize("path", [*(ROOT / "src").glob("*.py")], ids=lambda path: path.name)
def test_the_readme_names_every_launcher(path: Path) -> None:
    assert path.name in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in WITHOUT_TABLE])
def test_every_flag_stands_in_the_configuration(command: str) -> None:
    parser = parser_of(importlib.import_module(COMMANDS[command][0]))
    parser.description = parser.epilog = None  # which may name flags of other programs
    flags = set(re.findall(r"--[a-z][a-z-]+", parser.format_help())) - {"--help", "--help-all", "--version"}
    said = set(re.findall(r"--[a-z][a-z-]+", (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")))
    assert flags - said == set()


def test_the_tables_of_flags_are_what_the_commands_declare() -> None:
    """REWRITE=1 writes them."""
    path = ROOT / "docs" / "configuration.md"
    found = path.read_text(encoding="utf-8")
    made = with_tables(found)
    if os.environ.get("REWRITE"):
        path.write_text(made, encoding="utf-8")
    assert found == made or os.environ.get("REWRITE")


def test_the_models_say_what_each_family_was_tried_with() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = text[text.index("| `model_type` |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert all(re.match(r"made-up weights only$|\*\*real file tried\*\*: ", row[-1]) for row in cells)
    named = {word for row in cells for word in re.findall(r"\w+", row[0])}
    assert set(FAMILIES) - named == set()
