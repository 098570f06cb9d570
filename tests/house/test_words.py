"""Plain words: the pages, comments, docstrings and texts use the terms of the field, and no words that a reader has to guess.

A page has none of `FORBIDDEN`. What the code still has of them, from before the rule, is counted by room: the number may only
become smaller, and then it is written down here.
"""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

from tests.house import markdown
from tests.house.test_docs import PAGES, ROOT, files, page

#: Word -> what to write.
FORBIDDEN = {
    "nobody": "no worker, no client, no process",
    "whoever": "the peer, the caller, the process that",
    "whatever": "all that, any",
    "beside": "next to; besides",
    "somebody": "a client, a worker, a process",
    "anew": "again",
    "theirs": "the noun",
    "lest": "so that ... not",
    "hence": "so, therefore",
    "thus": "so",
    "for ever": "always, from then on, without end",
    "at last": "finally",
    "dialled in": "connected",
    "hasty": "what happened: ended before it was ready",
    "hopeless": "what happened: cannot be restored",
    "blameless": "what happened: a planned restart",
    "needy": "missing weights",
    "lacks": "has no, does not have",
    "shut": "closed, refused",
    "risen": "grown",
    "fallen": "lost, aborted",
    "what came": "the message, the bytes that arrived",
    "of theirs": "the noun",
}
WORDS = re.compile(rf"\b(?:{'|'.join(FORBIDDEN)})\b", re.IGNORECASE)
BRITISH = re.compile(
    r"\b(?:\w*(?:tokenis|initialis|normalis|serialis|recognis|optimis|organis)\w*|(?:colour|behaviour|neighbour|honour)\w*"
    r"|licence|learnt|centre|grey|towards|whilst|amongst)\b",
    re.IGNORECASE,
)
#: Room -> how many are left in its comments, docstrings and texts.
LEFT = {"enginepool": 0, "protocol": 0, "workers": 0, "bench": 1, "tests": 18}


def comments(source: str) -> list[tuple[int, str]]:
    """(line, text) of the comments of a file."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


@cache
def strings(source: str) -> list[tuple[int, str]]:
    """(line, text) of the strings of a file."""
    nodes = ast.walk(ast.parse(source))
    return [(node.lineno, node.value) for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def uses(source: str, words: re.Pattern[str] = WORDS) -> list[str]:
    """`line: word` of each of these words in a file's comments and strings."""
    # To find the comments takes much longer than to see that no line could have one with such a word.
    may = any("#" in line and words.search(line) for line in source.split("\n"))
    texts = [*(comments(source) if may else ()), *strings(source)]
    return [f"{line}: {word}" for line, text in texts for word in words.findall(text)]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_word_that_a_reader_has_to_guess(name: str) -> None:
    found = {word.lower() for word in WORDS.findall(markdown.prose(page(name)))}
    assert {word: FORBIDDEN[word] for word in found} == {}


@pytest.mark.parametrize("room", LEFT)
def test_the_code_has_fewer_of_these_words_each_time(room: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{use}"
        for file in files(".py")
        if ROOT / room in file.parents and file != Path(__file__)
        for use in uses(read(file))
    ]
    assert len(found) <= LEFT[room], "\n".join(["use other words:", *found])


def test_the_spelling_is_that_of_the_united_states() -> None:
    pages = {f"{name}: {word}" for name in PAGES for word in BRITISH.findall(markdown.prose(page(name)))}
    code = {
        f"{file.relative_to(ROOT)}:{use}"
        for file in files(".py")
        if any(ROOT / room in file.parents for room in LEFT) and file != Path(__file__)
        for use in uses(read(file), BRITISH)
    }
    assert pages | code == set()


def test_words_are_found_in_comments_docstrings_and_errors_and_not_in_names() -> None:
    source = '''"""What came."""\n# nobody\nshut = "for ever"\nraise Error(f"{shut} of theirs")\nbesides = 1\n'''
    assert uses(source) == ["2: nobody", "1: What came", "3: for ever", "4: of theirs"]


def read(file: Path) -> str:
    return file.read_text("utf-8")
