"""The reader of pages sees what is on them; the documentation tests are worth nothing if it overlooks a block."""

import pytest

from tests.house import markdown, test_docs
from tests.house.markdown import Block

PAGE = '''# The pool: a *map*

See [the rooms](#the-rooms), [code](enginepool/x.py "title") and `[not](this)` in `enginepool/x.py`.

```text
[nor](this)
```

<!-- file: pool.toml -->
```toml
[client]
```

1. Indented:

   ```console
   $ enginepool score \\
   >   in.jsonl out.jsonl
   12 answers
   $ enginepool status
   ```

<!-- only parsed: needs a GPU -->
````python
"""
```
"""
````

## The rooms

<!-- map -->
```text
enginepool/        the package
  client/          the client
    link.py        one file with zmq

protocol/          the wire
```
'''


def test_every_block_is_found_with_its_comment() -> None:
    found = [(block.language, block.line, block.key, block.value) for block in markdown.blocks(PAGE)]
    assert found == [
        ("text", 5, "", ""),
        ("toml", 10, "file", "pool.toml"),
        ("console", 16, "", ""),
        ("python", 24, "only parsed", "needs a GPU"),
        ("text", 33, "map", ""),
    ]


def test_a_fence_inside_a_longer_fence_is_text() -> None:
    assert next(block.text for block in markdown.blocks(PAGE) if block.language == "python") == '"""\n```\n"""\n'


def test_a_block_that_is_never_closed_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 2: this block is never closed"):
        list(markdown.blocks("text\n```python\nprint()\n"))


def test_commands_are_joined_and_output_is_left_out() -> None:
    console = next(block for block in markdown.blocks(PAGE) if block.language == "console")
    assert markdown.commands(console) == ["enginepool score in.jsonl out.jsonl", "enginepool status"]


def test_a_map_names_paths_under_their_folders() -> None:
    plan = next(block for block in markdown.blocks(PAGE) if block.key == "map")
    assert markdown.mapped_paths(plan) == ["enginepool", "enginepool/client", "enginepool/client/link.py", "protocol"]


def test_links_code_and_headings_are_told_apart() -> None:
    assert markdown.links(PAGE) == ["#the-rooms", "enginepool/x.py"]
    assert markdown.code_spans(PAGE) == ["[not](this)", "enginepool/x.py"]
    assert markdown.anchors(PAGE) == {"the-pool-a-map", "the-rooms"}


@pytest.mark.parametrize("place", ["|work|x", "cd |root|.cache", "'|home|me|x'", "see |tmp|x", "file:|||opt|x"])
def test_a_place_on_one_machine_is_recognized(place: str) -> None:
    assert test_docs.MACHINE.search(place.replace("|", "/"))


@pytest.mark.parametrize("place", ["ipc:|||tmp|pool", "https:||x.org|work|y", "frame|work|x", ".|home|x"])
def test_an_address_or_a_folder_of_that_name_is_none(place: str) -> None:
    assert test_docs.MACHINE.search(place.replace("|", "/")) is None


def test_a_console_block_without_commands_has_none() -> None:
    assert markdown.commands(Block("console", "enginepool status\n", 1)) == []
