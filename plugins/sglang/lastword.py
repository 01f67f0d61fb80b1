"""ENGINE_CORE_DEAD: the rank's last word, on every end this process can see.

SGLang's ranks die of SIGTERM by the default action, in the middle of whatever they do, so the scheduler's own code never
learns of it. The signal's wake-up descriptor reaches a thread of ours even while the main thread sits in a kernel.
SIGKILL cannot be seen; whoever supervises the process tells that.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType

import zmq

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
LINGER_MS = 1000
"""The most an end is delayed when nobody reads the last word."""


class LastWord:
    """Says it once, over sockets of its own: the scheduler's belong to the scheduler's thread."""

    def __init__(self, outputs: Sequence[str]) -> None:
        self._outputs = list(outputs)
        self._once = threading.Lock()

    def say(self) -> None:
        """Send the last word to every output, waiting at most `LINGER_MS`. Never raises; later calls do nothing."""
        if not self._once.acquire(blocking=False):
            return
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        for address in self._outputs:
            try:
                socket = context.socket(zmq.PUSH)
                socket.setsockopt(zmq.LINGER, LINGER_MS)
                socket.connect(address)
                socket.send(ENGINE_CORE_DEAD, zmq.NOBLOCK)
            except zmq.ZMQError:
                continue  # an address that is gone has no reader to tell
        context.destroy()

    def arm(self) -> None:
        """From now on SIGTERM ends this process by way of `say`. Call it on the main thread, as the rank's is."""
        if threading.current_thread() is not threading.main_thread():
            return
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _wake)
        threading.Thread(target=self._wait, args=(read_end,), name="last-word", daemon=True).start()

    def _wait(self, read_end: int) -> None:
        while signal.SIGTERM not in os.read(read_end, 64):
            pass
        self.say()
        os._exit(128 + signal.SIGTERM)


def _wake(number: int, frame: FrameType | None) -> None:
    """A handler of Python's, so that the signal reaches the wake-up descriptor."""
