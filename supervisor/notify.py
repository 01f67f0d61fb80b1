"""Tells systemd how the service stands: sd_notify's datagrams, spoken without its library.

Protocol: sd_notify(3). Nothing is sent unless systemd names a socket in NOTIFY_SOCKET.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import MutableMapping

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
EXTENSION_S = 60.0
"""How much more time a start or a stop that makes progress asks for at each word."""
WATCHDOG_SHARE = 0.4
"""Of the watchdog's time between two signs of life; systemd recommends half at most."""

log = logging.getLogger(__name__)


class Notifier:
    """Sends state changes; a socket that cannot be reached is logged once and costs nothing more."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Takes systemd's variables out of `environment`, so that no child speaks for us or believes it is watched."""
        taken = {name: environment.pop(name, "") for name in VARIABLES}
        address = taken["NOTIFY_SOCKET"]
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._broken = False
        self._interval_s = 0.0
        mine = taken["WATCHDOG_PID"] in ("", str(os.getpid()))
        if mine and taken["WATCHDOG_USEC"].isdecimal():
            self._interval_s = int(taken["WATCHDOG_USEC"]) / 1e6 * WATCHDOG_SHARE
        self._timer: asyncio.TimerHandle | None = None

    @property
    def wanted(self) -> bool:
        """Whether somebody listens."""
        return bool(self._address) and not self._broken

    def ready(self, status: str) -> None:
        """The service serves; also the end of a reload."""
        self._send("READY=1", f"STATUS={status}")

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={text}")

    def progress(self, text: str) -> None:
        """A start or a stop goes on: its time limit is extended."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(EXTENSION_S * 1e6)}", f"STATUS={text}")

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        # MONOTONIC_USEC is what Type=notify-reload compares with the time of its signal (systemd 253).
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reloading")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={status}")

    def start_watchdog(self) -> None:
        """From now on, a sign of life from the event loop at every part of the watchdog's time, where one is set."""
        if self._interval_s and self._timer is None:
            self._beat()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _beat(self) -> None:
        self._send("WATCHDOG=1")
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._beat)

    def _send(self, *assignments: str) -> None:
        if not self.wanted:
            return
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
            self._socket.sendto("\n".join(one.replace("\n", " ") for one in assignments).encode(), self._address)
        except BlockingIOError:
            log.debug("systemd does not read its notify socket; %s was dropped", assignments[0])
        except OSError as error:
            self._broken = True
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            log.warning("systemd's notify socket %s cannot be reached: %s", self._address, error.strerror)
