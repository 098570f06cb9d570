"""Threads of a program: its end waits for what they finish with, and not for what hangs."""

import subprocess
import sys

PROGRAM = """
import sys, threading
from enginepool.transfer import threads

hangs = threading.Event()

def late():
    hangs.wait(0.3)
    print("let go of everything", flush=True)

threads.start(late, "late")
if sys.argv[1] == "hangs":
    threads.start(hangs.wait, "hangs")
"""


def run(case: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, case], capture_output=True, text=True, timeout=60, check=True)
    assert not done.stderr
    return done.stdout


def test_a_thread_is_through_before_the_interpreter_is_taken_down() -> None:
    assert run("late") == "let go of everything\n"


def test_a_thread_that_hangs_does_not_keep_the_program() -> None:
    assert run("hangs") == "let go of everything\n"
