"""The pages: links and anchors, tables made from ktft's rows and records, and the code that they name."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from ktft.config import EXPERT_FORMATS, SETTINGS, Settings

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
SOURCES = [
    path
    for folder in ("ktft", "ktft_autoload", "csrc", "tests", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".cc", ".h", ".inc", ".yaml", ".md"}
]
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(path: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """What GitHub and the site make of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(path: Path) -> Iterator[tuple[str, Path, str]]:
    """Relative links: as written, the file that they name, the anchor."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if not target.startswith(("http://", "https://")):
            file, _, anchor = target.partition("#")
            yield target, (path.parent / file).resolve() if file else path, anchor


def code_names(path: Path, pattern: str) -> set[str]:
    """Inline code that matches."""
    return {name for name in re.findall(r"`([^`\n]+)`", prose(path)) if re.fullmatch(pattern, name)}


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """docs/tables.py"""
    spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_and_anchors_resolve() -> None:
    broken = [
        f"{name_of(path)}: {written}"
        for path in TEXTS
        for written, file, anchor in links(path)
        if not file.exists() or (anchor and anchor not in anchors(file))
    ]
    assert not broken


def test_pages_link_to_pages_alone() -> None:
    """Whatever else is in the repository has no place on the site: name it as code."""
    outside = [
        f"{name_of(path)}: {written}"
        for path in PAGES
        for written, file, _ in links(path)
        if not file.is_relative_to(DOCS)
    ]
    assert not outside


def test_the_site_has_every_page_once() -> None:
    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(below)

    nav = sorted(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert nav == sorted(path.relative_to(DOCS).as_posix() for path in PAGES)


def test_the_home_page_leads_to_every_page() -> None:
    home = DOCS / "README.md"
    assert {file for _, file, _ in links(home)} == {*PAGES} - {home}


def test_lists_and_tables_follow_an_empty_line() -> None:
    """Python-Markdown, which makes the site, reads them as part of the paragraph otherwise."""
    begin = re.compile(r"- |\d+\. |\|")
    glued = []
    for path in PAGES:
        lines = prose(path).splitlines()
        for before, line in itertools.pairwise(lines):
            if begin.match(line) and before.strip() and not begin.match(before) and not before.startswith(("#", "  ")):
                glued.append(f"{name_of(path)}: {line[:60]}")
    assert not glued


def test_tables_are_as_they_are_made(tables: ModuleType) -> None:
    stale = [name_of(path) for path in PAGES if tables.filled(path.read_text()) != path.read_text()]
    assert not stale, "run: python docs/tables.py"


def test_every_record_is_shown(tables: ModuleType) -> None:
    shown = {part[2].partition(" ")[2] for path in PAGES for part in tables.PART.finditer(path.read_text())}
    assert {path.stem for path in (DOCS / "benchmarks").glob("*.json")} <= shown


def test_a_part_that_changed_is_made_anew(tables: ModuleType) -> None:
    page = "before\n<!-- docs/tables.py families -->\nold\n<!-- end -->\nafter"
    made = tables.filled(page)
    assert "old" not in made and "| Mixtral | `mixtral` | yes | yes |" in made
    assert made.startswith("before\n") and made.endswith("\nafter")
    assert tables.filled(made) == made


@pytest.mark.parametrize(("page", "limit"), [("README.md", 650), ("docs/guide/benchmarks.md", 1500)])
def test_short_pages_stay_short(page: str, limit: int) -> None:
    assert len((ROOT / page).read_text().split()) <= limit


def test_pages_name_files_that_exist() -> None:
    """`xyz` stands for a name of the reader's."""
    roots = r"(?:ktft|ktft_autoload|csrc|tests|examples|docs|ci)"
    missing = [
        f"{name_of(path)}: {name}"
        for path in TEXTS
        for name in code_names(path, rf"{roots}/(?!.*xyz)[\w./-]*(?:\.\w+|/)")
        if not (ROOT / name).exists()
    ]
    assert not missing


def test_sources_name_pages_that_exist() -> None:
    """Messages and comments send people to pages."""
    named = {(name_of(path), page) for path in SOURCES for page in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    assert len(named) > 10
    assert not sorted(f"{source}: {page}" for source, page in named if not (ROOT / page).exists())


def test_kt_config_has_every_key_with_its_default() -> None:
    page = (DOCS / "reference/kt-config.md").read_text().partition("## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE))
    assert set(rows) == set(SETTINGS)
    for key, shown in rows.items():
        default = getattr(Settings(), key)
        if default is not None:
            assert shown.strip("`") == str(default).lower(), key


def test_formats_has_every_format() -> None:
    """In the table of formats and in that of errors."""
    page = (DOCS / "reference/formats.md").read_text()
    for text in (page.partition("## ")[0], page.partition("## Error")[2].partition("## ")[0]):
        named = re.findall(r"^\| `(\w+)`(?: \(default\))? \|", text, re.MULTILINE)
        assert sorted(named) == sorted(EXPERT_FORMATS)


def test_every_environment_variable_has_a_line() -> None:
    read = re.findall(r"\"(KTFT_[A-Z_]+)\"", (ROOT / "ktft/config.py").read_text())
    page = (DOCS / "reference/kt-config.md").read_text()
    inner = {"KTFT_SERVE"}  # from `ktft serve` to the processes that it starts
    assert not [name for name in set(read) - inner if f"`{name}" not in page]


def test_glossary_names_what_exists() -> None:
    """A row's last cell is `NAME` in `PATH`, a file or a folder; several are separated by commas."""
    rows = re.findall(r"^\| (\*\*.+?\*\*) \|.*\| (.+) \|$", (DOCS / "dev/glossary.md").read_text(), re.MULTILINE)
    assert len(rows) >= 25
    for term, where in rows:
        names = re.findall(r"`([\w.]+)` in `([\w./-]+)`", where)
        assert names, term
        for name, place in names:
            path = ROOT / place
            files = (
                [path] if path.is_file() else [f for f in path.rglob("*") if f.suffix in {".py", ".h", ".cc", ".inc"}]
            )
            assert any(re.search(rf"\b{name}\b", f.read_text()) for f in files), f"{term}: {name} is not in {place}"


def test_architecture_names_every_folder() -> None:
    page = (DOCS / "dev/architecture.md").read_text()
    folders = [f"{top}/{path.name}/" for top in ("ktft", "csrc") for path in (ROOT / top).iterdir() if path.is_dir()]
    missing = [name for name in folders if "__pycache__" not in name and not re.search(rf"^{name}", page, re.MULTILINE)]
    assert not missing
