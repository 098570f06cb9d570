"""The few things of a Markdown page that the tests look at: fenced blocks, the comment before each, links, headings.

A comment on the line before a block says how the tests treat it; it is invisible where the page is read:

    <!-- file: pool.toml -->      the block is written to that file before the page's commands and programs run
    <!-- only parsed: REASON -->  the block is not run, for this reason
    <!-- model: NAME NAME -->     small random models with these names are in the folder in which the block is run
    <!-- map -->                  the first word of each line is a path in the repository, indented under its folder
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[\w+-]*)[^`]*$")
COMMENT = re.compile(r"^ *<!-- *(?P<key>file|only parsed|map|model)(?: *: *(?P<value>.*?))? *-->$")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^()\s]+(?:\([^()\s]*\))?)(?: +\"[^\"]*\")?\)")
CODE = re.compile(r"(`+)(?P<code>.+?)\1")


class Block(NamedTuple):
    """A fenced block: its language, its text, the line of its fence, and the comment before it."""

    language: str
    text: str
    line: int
    key: str = ""
    value: str = ""


def blocks(page: str) -> Iterator[Block]:
    """Every fenced block of a page. One that is never closed is an error: it swallows the rest of the page."""
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        opened = FENCE.match(lines[number])
        number += 1
        if opened is None:
            continue
        first, indent, fence = number, len(opened["indent"]), opened["fence"]
        while number < len(lines) and lines[number].strip() != fence:
            number += 1
        if number == len(lines):
            raise ValueError(f"line {first}: this block is never closed")
        text = "".join(line[min(indent, len(line) - len(line.lstrip())) :] + "\n" for line in lines[first:number])
        said = COMMENT.match(lines[first - 2]) if first > 1 else None
        number += 1
        yield Block(opened["language"], text, first, said["key"] if said else "", (said["value"] or "") if said else "")


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    kept: list[str] = []
    fence = ""
    for line in page.splitlines():
        opened = FENCE.match(line)
        if fence:
            fence = "" if line.strip() == fence else fence
        elif opened:
            fence = opened["fence"]
        else:
            kept.append(line)
    return "\n".join(kept)


def links(page: str) -> list[str]:
    """The targets of the page's links and pictures, without those that stand in code."""
    return [found["target"] for found in LINK.finditer(CODE.sub("", prose(page)))]


def code_spans(page: str) -> list[str]:
    """What the page's prose sets as code."""
    return [found["code"] for found in CODE.finditer(prose(page))]


def anchors(page: str) -> set[str]:
    """The names that a link may add after `#`, made of the headings as GitHub makes them."""
    found: set[str] = set()
    for line in prose(page).splitlines():
        if re.match(r"#{1,6} ", line):
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()).lower()
            name = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            found.add(name if name not in found else f"{name}-{sum(a == name or a.startswith(f'{name}-') for a in found)}")
    return found


def commands(block: Block) -> list[str]:
    """The commands of a console block: its lines that begin with `$ `, joined where one ends in a backslash."""
    found: list[str] = []
    open_line = False
    for line in block.text.splitlines():
        if open_line:
            found[-1] += " " + line.removeprefix(">").strip().removesuffix("\\").strip()
        elif line.startswith("$ "):
            found.append(line[2:].strip().removesuffix("\\").strip())
        open_line = (open_line or line.startswith("$ ")) and line.rstrip().endswith("\\")
    return found


def mapped_paths(block: Block) -> list[str]:
    """The paths that a map names: the first word of each line, under the folders that it is indented beneath."""
    found: list[str] = []
    above: list[tuple[int, str]] = []
    for line in block.text.splitlines():
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        above = [(indent, name) for indent, name in above if indent < depth]
        name = line.split()[0].rstrip("/")
        found.append("/".join([*(folder for _, folder in above), name]))
        above.append((depth, name))
    return found
