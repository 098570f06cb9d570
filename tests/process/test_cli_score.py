"""`enginepool score` and its files: every line answered once, with any file there before and after any interruption."""

import asyncio
import errno
import fcntl
import json
import os
import resource
import signal
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool.cli import file_run
from enginepool.errors import BadRequest, PoolDown, UnknownGroup
from tests.process.commands import call, records


@dataclass
class Answer:
    """As much of a ScoreResult as the command reads."""

    scores: Any
    hidden: Any = None
    version: int = 3
    workers: tuple[str, ...] = ("policy-0",)
    usage: Any = field(default_factory=lambda: type("Usage", (), {"tokens": 5}))


@dataclass
class StandIn:
    """A pool whose score of an item is its length, and which does what a query tells it to."""

    asked: list[Any] = field(default_factory=list[Any])
    settings: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    stages: tuple[str, ...] = ("policy: policy-0 ready",)
    #: of the weights that answer now
    version: int = 3

    async def score(self, query: Any, items: list[Any], **settings: Any) -> Answer:
        self.asked.append(query)
        self.settings.append(settings)
        if query == "refuse":
            raise BadRequest("items[0]: too long", field="items[0]", limit="9")
        if query == "which group?" and not settings["group"]:
            raise UnknownGroup("group: name one of: a, b")
        if query == "down":
            raise PoolDown("no worker of group policy is left")
        if query == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if query == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        if query in ("interrupt", "terminate"):
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(0)
        return Answer(np.array([[len(item)] for item in items], dtype=np.float32), version=self.version)

    async def ready(self, *, group: str, report: Callable[[str], None]) -> None:
        for line in self.stages:
            report(line)

    async def score_pairs(self, prompts: list[Any], responses: list[Any], **settings: Any) -> Answer:
        return await self.score(prompts[0], responses, **settings)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Let `score` find this pool at any address."""
    stand_in = StandIn()

    @asynccontextmanager
    async def open_pool(address: str):  # type: ignore[no-untyped-def]
        yield stand_in

    monkeypatch.setattr(file_run, "open_pool", open_pool)
    return stand_in


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """An input of ten requests, and where the output goes."""
    source = tmp_path / "in.jsonl"
    source.write_text(
        "".join(json.dumps({"id": f"r{n}", "query": f"q{n}", "items": ["x" * n, "y"]}) + "\n" for n in range(1, 11))
    )
    return source, tmp_path / "out.jsonl"


def test_each_line_gets_one_answer_under_its_number(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    code, out, err = call("score", source, target)
    assert (code, out) == (0, "")
    assert err == f"{target}: 10 lines answered, 0 with an error\n"
    found = records(target)
    assert {n: (r["id"], r["scores"], r["version"]) for n, r in found.items()} == {
        n: (f"r{n}", [[n], [1]], 3) for n in range(1, 11)
    }


def test_what_the_pool_is_doing_is_told_while_it_loads(pool: StandIn, files: tuple[Path, Path]) -> None:
    pool.stages = ("policy: policy-0 loading", "policy: policy-0 ready")
    _, _, err = call("score", *files)
    assert err.splitlines()[:2] == list(pool.stages)


def test_a_finished_run_repeated_asks_nothing(pool: StandIn, files: tuple[Path, Path]) -> None:
    call("score", *files)
    before = files[1].read_bytes()
    pool.asked.clear()
    assert call("score", *files)[0] == 0
    assert (pool.asked, files[1].read_bytes()) == ([], before)


def test_a_cut_off_last_line_is_cut_away_and_asked_again(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    call("score", source, target)
    whole = target.read_bytes()
    for keep in range(len(whole) - len(whole.splitlines()[-1]), len(whole) - 1):
        pool.asked.clear()
        target.write_bytes(whole[:keep])
        assert call("score", source, target)[0] == 0
        assert len(pool.asked) <= 1
        assert records(target).keys() == set(range(1, 11))


def test_lines_added_to_the_input_are_scored_by_the_next_run(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    call("score", source, target)
    pool.asked.clear()
    with source.open("a") as more:
        more.write('\n   \n{"query": "new", "items": ["a"]}')
    assert call("score", source, target)[0] == 0
    assert pool.asked == ["new"]
    assert records(target)[13]["scores"] == [[1]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("precious notes", "line 1 is no answer"),
        ('{"query": "a", "items": ["b"]}\n', "line 1 is no answer"),
        ('{"line":1,"input_crc":2}\n', "its answer to line 1 of"),
        ('{"line":99999999999,"input_crc":2}\n', "line 1 is no answer"),
        ('{"line":0,"input_crc":2}\n', "line 1 is no answer"),
        ('{"line":1,"input_crc":-2}\n', "line 1 is no answer"),
        ('{"line":11,"input_crc":2}\n', "answers line 11, but"),
        ('{"line":1,"input_crc":2}\n{"line":1,"input_crc":2}\n', "line 2 is no answer"),
    ],
)
def test_an_output_of_something_else_is_left_alone(pool: StandIn, files: tuple[Path, Path], text: str, said: str) -> None:
    files[1].write_text(text)
    code, _, err = call("score", *files)
    assert (code, err.count("\n"), files[1].read_text(), pool.asked) == (2, 1, text, [])
    assert said in err


def test_answers_to_another_input_or_with_other_options_are_refused(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    call("score", source, target)
    before = target.read_bytes()
    assert call("score", source, target, "--priority", 5, "--concurrency", 1)[0] == 0
    for options in (
        ["--softmax"],
        ["--logprobs"],
        ["--temperature", 2],
        ["--truncation", "error"],
        ["--raw"],
        ["--label-token-ids", "1"],
        ["--labels", "yes"],
        ["--group", "other"],
        ["--item-first"],
        ["--hidden"],
    ):
        assert call("score", source, target, *options)[0] == 2
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join([*lines[:6], lines[6].replace("q7", "other"), *lines[7:]]))
    code, _, err = call("score", source, target)
    assert (code, target.read_bytes()) == (2, before)
    assert f"its answer to line 7 of {source} was made from another line" in err


def test_bad_lines_get_an_error_with_their_number_and_do_no_harm(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    bad = {
        "{": "not JSON",
        "[1]": "a list; must be an object",
        '{"query": "a"}': "needs query and items, or prompts and responses, or messages",
        '{"query": "a", "items": ["b"], "prompts": ["c"]}': "needs query and items, or prompts and responses",
        '{"query": "a", "items": "b"}': "items: a string; must be a list, or null",
        '{"id": "r6", "query": "a", "items": ["b"], "lables": [1]}': "unknown key lables",
        '{"query": "a", "items": ["b"], "priority": 0.5}': "priority: a number; must be a whole number, or null",
        '{"query": "refuse", "items": ["b"]}': "items[0]: too long",
        '{"messages": ' + "[" * 100_000: "not JSON: maximum recursion depth exceeded",
        '{"query": ' + "[" * 100_000: "query[0]: a list; must be a whole number",
    }
    source.write_text("".join(f"{line}\n" for line in bad) + '{"query": "a", "items": ["b"]}\n')
    with source.open("ab") as more:
        more.write(b'{"query": "\xff", "items": ["b"]}\n')
    code, _, err = call("score", source, target)
    assert code == 1
    assert f'11 lines with an error: look for "error" in {target}' in err
    found = records(target)
    assert found[11]["scores"] == [[1]]
    for number, said in enumerate(bad.values(), start=1):
        message = found[number]["error"]["message"]
        assert message.startswith(f"line {number}: ")
        assert said in message
    assert found[8]["error"] == {
        "code": "bad_request",
        "message": "line 8: items[0]: too long",
        "field": "items[0]",
        "limit": "9",
    }
    assert "line 12: not JSON" in found[12]["error"]["message"]
    assert found[6]["id"] == "r6" and "id" not in found[7]
    source.write_text('{"id": [1], "query": "a"}\n{"id": 7, "query": "a", "group": "g", "timeout": "1 s"}\n')
    target.unlink()
    assert call("score", source, target)[0] == 1
    found = records(target)
    assert found[1].keys() == {"line", "input_crc", "error"} and (found[2]["id"], found[2]["group"]) == (7, "g")


def test_a_byte_order_mark_before_the_first_line_is_skipped(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    assert call("score", source, target)[0] == 0
    assert records(target)[1]["scores"] == [[1], [1]]
    assert call("score", source, target)[0] == 0 and len(pool.asked) == 10


def test_errors_stay_until_they_are_asked_again(
    pool: StandIn, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = files
    source.write_text('{"query": "a", "items": ["b"]}\n{"query": "refuse", "items": ["b"]}\n{"query": "c", "items": ["d"]}\n')
    assert call("score", source, target)[0] == 1
    pool.asked.clear()
    assert call("score", source, target)[0] == 1
    assert pool.asked == []

    async def willing(query: Any, items: list[Any], **settings: Any) -> Answer:
        pool.asked.append(query)
        return Answer(np.zeros((len(items), 1), dtype=np.float32))

    monkeypatch.setattr(pool, "score", willing)
    assert call("score", source, target, "--retry-errors")[0] == 0
    assert pool.asked == ["refuse"]
    assert records(target).keys() == {1, 2, 3}
    assert [path.name for path in target.parent.iterdir()] == ["in.jsonl", "out.jsonl"]


def test_errors_are_asked_again_behind_a_link_and_for_the_same_readers(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    real = target.parent / "elsewhere" / "real.jsonl"
    real.parent.mkdir()
    real.touch(0o600)
    target.symlink_to(real)
    source.write_text('{"query": "a", "items": ["b"]}\n{"query": "refuse", "items": ["b"]}\n')
    assert call("score", source, target)[0] == 1
    source.write_text('{"query": "a", "items": ["b"]}\n{"query": "c", "items": ["b"]}\n')
    assert call("score", source, target, "--retry-errors")[0] == 0
    assert target.is_symlink() and "error" not in real.read_text() and records(real).keys() == {1, 2}
    assert real.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in real.parent.iterdir()] == ["real.jsonl"]


def test_a_full_disk_keeps_the_errors_that_were_to_be_asked_again_and_takes_no_room(
    pool: StandIn, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = files
    source.write_text('{"query": "a", "items": ["b"]}\n{"query": "refuse", "items": ["b"]}\n')
    assert call("score", source, target)[0] == 1
    before = target.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("enginepool.cli.answers.os.fsync", full)
        code, _, err = call("score", source, target, "--retry-errors")
    assert (code, target.read_bytes()) == (1, before)
    assert err == f"enginepool: {target}.part: No space left on device; {target} is not changed\n"
    assert sorted(path.name for path in target.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_when_the_pool_is_down_the_run_stops_and_blames_no_line(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    source.write_text('{"query": "a", "items": ["b"]}\n{"query": "down", "items": ["b"]}\n{"query": "c", "items": ["d"]}\n')
    code, _, err = call("score", source, target, "--concurrency", 1)
    assert code == 1
    assert err.endswith("stopped at line 2: no worker of group policy is left; run the same command again to continue\n")
    assert records(target).keys() == {1}


def test_a_run_that_lacks_a_group_leaves_no_error_behind_and_goes_on_with_one(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    ask = '{"query": "which group?", "items": ["b"]}\n'
    source.write_text('{"query": "a"}\n{"query": "refuse", "items": ["b"]}\n' + ask)
    code, _, err = call("score", source, target, "--concurrency", 1)
    assert code == 2 and err.endswith("group: name one of: a, b; choose one with --group\n") and not target.exists()
    assert call("score", source, target, "--concurrency", 1, "--group", "a")[0] == 1
    found = records(target)
    assert found[3]["scores"] == [[1]] and "error" in found[1] and "error" in found[2]


def test_a_run_whose_lines_all_lack_a_group_asks_few_of_them(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    source.write_text('{"query": "which group?", "items": ["b"]}\n' * 1000)
    code, _, err = call("score", source, target, "--concurrency", 1)
    assert code == 2 and err.endswith("group: name one of: a, b; choose one with --group\n") and not target.exists()
    assert len(pool.asked) == 100


@pytest.mark.parametrize("concurrency", [1, 64])
def test_a_line_that_lacks_a_group_has_an_error_of_its_own(pool: StandIn, files: tuple[Path, Path], concurrency: int) -> None:
    source, target = files
    line = '{"query": "which group?", "items": ["b"]'
    source.write_text(f"{line}}}\n" + f'{line}, "group": "b"}}\n' * 3)
    code, _, err = call("score", source, target, "--concurrency", concurrency)
    assert code == 1 and f'1 line with an error: look for "error" in {target}' in err
    found = records(target)
    assert found[1]["error"] == {"code": "unknown_group", "message": "line 1: group: name one of: a, b"}
    assert [found[number]["scores"] for number in (2, 3, 4)] == [[[1]]] * 3
    # The option changes that line alone.
    pool.asked.clear()
    code, _, err = call("score", source, target, "--group", "a")
    assert code == 2 and "its answer to line 1 of" in err and "add --retry-errors" in err
    assert call("score", source, target, "--group", "a", "--retry-errors")[0] == 0
    assert len(pool.asked) == 1 and records(target)[1]["scores"] == [[1]]


def test_an_option_that_a_line_says_itself_is_no_other_option_for_its_answer(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    own = {"group": "g", "label_token_ids": [1], "temperature": 1.0, "truncation": "left"}
    lines = [own, {**own, "label_token_ids": None, "labels": ["yes"]}]
    source.write_text("".join(json.dumps({"query": "a", "items": ["b"], **line}) + "\n" for line in lines))
    assert call("score", source, target)[0] == 0
    pool.asked.clear()
    before = target.read_bytes()
    for option in (["--group", "h"], ["--label-token-ids", 2], ["--labels", "no"], ["--truncation", "right"]):
        assert call("score", source, target, *option)[0] == 0, option
    assert (pool.asked, target.read_bytes()) == ([], before)
    assert call("score", source, target, "--item-first")[0] == 2
    source.write_text(source.read_text().replace("[1]", "null"))
    assert call("score", source, target)[0] == 2


def test_errors_are_asked_again_of_lines_that_were_corrected(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    good = '{"query": "a", "items": ["b"]}\n'
    source.write_text(good + '{"query": "b"}\n' + good + '{"query": "refuse", "items": ["b"]}\n{\n')
    assert call("score", source, target)[0] == 1
    pool.asked.clear()
    source.write_text(good + '{"query": "b", "items": ["b"]}\n' + good + '{"query": "c", "items": ["b"]}\n')
    before = target.read_bytes()
    code, _, err = call("score", source, target)
    assert (code, target.read_bytes()) == (2, before) and "add --retry-errors" in err
    assert call("score", source, target, "--retry-errors")[0] == 0
    assert pool.asked == ["b", "c"] and records(target).keys() == {1, 2, 3, 4}
    # Answers are still held to their lines.
    source.write_text(good.replace("a", "other") + "{\n")
    before = target.read_bytes()
    code, _, err = call("score", source, target, "--retry-errors")
    assert (code, target.read_bytes()) == (2, before) and "its answer to line 1 of" in err and "--retry-errors" not in err


@pytest.mark.parametrize(("query", "code"), [("interrupt", 130), ("terminate", 143)])
def test_an_interrupted_run_says_how_to_go_on(pool: StandIn, files: tuple[Path, Path], query: str, code: int) -> None:
    source, target = files
    source.write_text(f'{{"query": "a", "items": ["b"]}}\n{{"query": "{query}", "items": ["b"]}}\n')
    got, _, err = call("score", source, target, "--concurrency", 1)
    assert got == code
    assert err.endswith(f"interrupted: 1 line in {target}, 1 of them new; run the same command again to continue\n")
    assert records(target).keys() == {1}


def test_a_full_disk_is_said_with_the_name_of_the_file_and_the_run_goes_on_later(
    pool: StandIn, files: tuple[Path, Path]
) -> None:
    source, target = files
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    try:
        code, _, err = call("score", source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert err == f"enginepool: {target}: File too large; run the same command again to continue\n"
    assert target.stat().st_size == 300
    assert call("score", source, target)[0] == 0
    assert records(target).keys() == set(range(1, 11))


def test_a_resumed_run_does_not_mix_weight_versions(pool: StandIn, files: tuple[Path, Path]) -> None:
    """800 lines of one version and 3,200 of another are no result: the run stops, and says what would be mixed."""
    source, target = files
    whole = source.read_text()
    source.write_text("".join(whole.splitlines(keepends=True)[:4]))
    call("score", source, target)
    source.write_text(whole)
    before = target.read_bytes()
    pool.version = 4
    code, _, err = call("score", source, target, "--concurrency", 1)
    assert (code, target.read_bytes()) == (1, before)
    assert f"stopped at line 5: weight version 4 answered it, and {target} has answers of version 3" in err
    assert "--mixed-versions" in err
    code, _, err = call("score", source, target, "--mixed-versions")
    assert code == 0
    assert {n: record["version"] for n, record in records(target).items()} == {n: 3 if n <= 4 else 4 for n in range(1, 11)}
    assert f"{target}: answers of several weight versions: 4 of weight version 3, 6 of weight version 4\n" in err


def test_a_finished_file_is_finished_with_any_weights(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    assert call("score", source, target)[0] == 0
    pool.version = 4
    code, _, err = call("score", source, target)
    assert (code, len(pool.asked)) == (0, 10), "nothing is left to ask"
    assert "weight version" not in err


def test_groups_that_lines_name_have_versions_of_their_own(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    source.write_text('{"query": "a", "items": ["b"], "group": "g"}\n')
    assert call("score", source, target)[0] == 0
    with source.open("a") as more:
        more.write('{"query": "a", "items": ["b"], "group": "h"}\n')
    pool.version = 1
    assert call("score", source, target)[0] == 0
    assert [(record["group"], record["version"]) for record in records(target).values()] == [("g", 3), ("h", 1)]
    with source.open("a") as more:
        more.write('{"query": "a", "items": ["b"], "group": "g"}\n')
    code, _, err = call("score", source, target)
    assert code == 1
    assert "has answers of version 3" in err


def test_two_runs_never_write_one_output(pool: StandIn, files: tuple[Path, Path]) -> None:
    with files[1].open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, _, err = call("score", *files)
    assert (code, err.count("\n"), pool.asked) == (1, 1, [])
    assert "another run is writing it" in err


def test_what_a_line_says_goes_before_what_the_command_line_says(pool: StandIn, files: tuple[Path, Path]) -> None:
    source, target = files
    source.write_text(
        '{"prompts": [[1, 2]], "responses": [[3]], "priority": 7, "apply_softmax": false, "min_version": 9, "version": 9}\n'
        '{"query": "a", "items": ["b"], "group": "g", "timeout": 2.5, "labels": ["yes", "no"]}\n'
    )
    flags = ["--priority", 1, "--softmax", "--logprobs", "--raw", "--min-version", 2, "--version", 8]
    flags += ["--temperature", 0.5, "--truncation", "left"]
    assert call("score", source, target, *flags, "--label-token-ids", "4,5", "--timeout", 9)[0] == 0
    assert pool.asked == [[1, 2], "a"]
    shared: dict[str, Any] = {
        "label_token_ids": [4, 5],
        "labels": None,
        "item_first": False,
        "return_pooled_hidden_states": False,
        "logprobs": True,
        "raw": True,
        "temperature": 0.5,
        "truncation": "left",
    }
    assert pool.settings == [
        {**shared, "apply_softmax": False, "group": "", "priority": 7, "timeout": 9, "min_version": 9, "version": 9},
        {
            **shared,
            "label_token_ids": None,
            "labels": ["yes", "no"],
            "apply_softmax": True,
            "group": "g",
            "priority": 1,
            "timeout": 2.5,
            "min_version": 2,
            "version": 8,
        },
    ]


def test_softmax_over_one_label_is_refused_by_the_name_of_the_option(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"query": [1], "items": [[2]]}\n')
    code, _, err = call("score", source, tmp_path / "out.jsonl", "--softmax", "--label-token-ids", "5")
    assert (code, err.partition(": over")[0]) == (2, "enginepool: --softmax")
    assert not (tmp_path / "out.jsonl").exists()
