"""Find the first error in a log."""

from __future__ import annotations

import pytest

from penstock._pipeline.servers.log_errors import first_error

TRACEBACK = """\
INFO starting
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    raise ValueError
ValueError: first
  Value of more than one line

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 2, in <module>
RuntimeError: second
INFO stopped"""

LOGGED = """\
WARNING failed to raise the limit, the error was: none
(Worker pid=3) ERROR 12:00 Traceback (most recent call last):
(Core pid=2) INFO 12:00 waiting
(Worker pid=3) ERROR 12:00   File "a.py", line 1
(Worker pid=3) ERROR 12:00 a.B: one
(Worker pid=3) ERROR 12:00 two
(Worker pid=3) ERROR 12:01 of another record
(Core pid=2) ERROR 12:01 Traceback (most recent call last):
(Core pid=2) ERROR 12:01 Exception: worker failed"""

GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 1
  | ExceptionGroup: several (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "b.py", line 2
    | OSError: no space left
    +------------------------------------"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (TRACEBACK, "ValueError: first\n  Value of more than one line"),
        (LOGGED, "a.B: one\ntwo"),
        (GROUP, "OSError: no space left"),
        ("Traceback (most recent call last):\n  cut off", ""),
        (
            "serve.py: usage\nserve.py: error: unrecognized arguments: --moel\nbye",
            "serve.py: error: unrecognized arguments: --moel",
        ),
        ("2026 INFO fine\n2026 ERROR disk\n2026 FATAL x", "2026 ERROR disk"),
        ("thread 'main' panicked at src/main.rs:2:5:\nboom", "thread 'main' panicked at src/main.rs:2:5:"),
        ("java.lang.OutOfMemoryError: heap", "java.lang.OutOfMemoryError: heap"),
        ("0 errors so far\nall went well", ""),
        ("", ""),
    ],
)
def test_the_first_error_is_the_end_of_the_first_traceback_or_the_first_line_of_one(log: str, error: str) -> None:
    assert first_error(log.splitlines()) == error
