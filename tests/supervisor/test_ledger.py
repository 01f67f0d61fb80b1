"""What a front end has in flight is read after its SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from bridge.supervisor import ledger
from bridge.supervisor.ledger import Ledger
from tests.conftest import ROOT

WRITER = """
import sys, time
from bridge.supervisor.ledger import Ledger
book = Ledger(int(sys.argv[1]))
cells = [book.enter(number) for number in range(1, 101)]
for cell in cells[:98]:
    book.leave(cell)
book.enter(500, held=True)
print("up", flush=True)
time.sleep(60)
"""


def test_it_outlives_its_writer() -> None:
    fd = ledger.create(100)
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    found = ledger.read(fd)
    assert found is not None and sorted(found[0]) == [99, 100] and found[1] == [500]
    os.close(fd)


def test_one_that_nobody_wrote_is_empty_and_one_of_another_version_is_unknown() -> None:
    fd = ledger.create(4)
    assert ledger.read(fd) == ([], [])
    Ledger(fd).enter(7)
    assert ledger.read(fd) == ([7], [])
    os.pwrite(fd, b"hbledg9\0", 0)
    assert ledger.read(fd) is None
    os.close(fd)


def test_as_many_cells_as_asked_for_and_each_comes_back() -> None:
    fd = ledger.create(3)
    book = Ledger(fd)
    for _ in range(10):
        cells = [book.enter(number) for number in (1, 2, 3)]
        assert len(set(cells)) == 3
        book.leave(book.enter(4))  # finds no cell
        for cell in cells:
            book.leave(cell)
    assert ledger.read(fd) == ([], [])
    os.close(fd)
