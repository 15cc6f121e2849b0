"""Makes the haystack of the evaluation: `python -m launch.evaluation_text`.

Downloads Debian's packages of the King James Version (text in the public domain) and WordNet, and writes
`jaxinfer/evaluation/data/kjv.txt.xz` (a verse a line, an empty line between chapters) and `words.json` (adjectives and
nouns of four to ten letters, for the keys of the tasks).
"""

import argparse
import json
import lzma
import re
import subprocess
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "jaxinfer" / "evaluation" / "data"
PACKAGES = ("bible-kjv", "bible-kjv-text", "wordnet-base")


def unpack(cache: Path) -> Path:
    """Downloads and unpacks the packages, unless that has been done, and returns the folder of their files."""
    root = cache / "root"
    if not root.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=cache, check=True)
        for package in sorted(cache.glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, root], check=True)
    return root


def bible(root: Path) -> str:
    """The text, printed by the package's own program."""
    command = [root / "usr/bin/bible", "-f", "gen1:1-rev22:21"]
    text = subprocess.run(command, cwd=root / "usr/lib", capture_output=True, text=True, check=True).stdout
    lines, chapter = [], ""
    for name, verse in re.findall(r"^(\S+?\d+):\d+ (.*)$", text, flags=re.MULTILINE):
        if chapter not in ("", name):
            lines.append("")
        chapter = name
        lines.append(re.sub(r"[<>\[\]]", "", verse).strip())
    return "\n".join(lines) + "\n"


def words(root: Path, file: str) -> list[str]:
    """The words of one of WordNet's indexes, those of four to ten letters with at least ten uses in its texts' tags."""
    found = []
    for line in (root / f"usr/share/wordnet/index.{file}").read_text().splitlines():
        fields = line.split()
        # The last fields but the offsets of the senses: number of senses, number of senses with uses in tagged texts.
        senses = int(fields[2]) if fields and not line.startswith(" ") else 0
        if senses and re.fullmatch(r"[a-z]{4,10}", fields[0]) and int(fields[-senses - 1]) >= 1:
            found.append(fields[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/jaxinfer-evaluation", help="downloads")
    root = unpack(parser.parse_args().cache)
    DATA.mkdir(exist_ok=True)
    (DATA / "kjv.txt.xz").write_bytes(lzma.compress(bible(root).encode(), preset=9 | lzma.PRESET_EXTREME))
    lists = {"adjectives": words(root, "adj"), "nouns": words(root, "noun")}
    (DATA / "words.json").write_text(json.dumps(lists, indent=0) + "\n")
    print({name: len(found) for name, found in lists.items()}, (DATA / "kjv.txt.xz").stat().st_size)


if __name__ == "__main__":
    main()
