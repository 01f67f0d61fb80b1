"""What a connection sends of its calls' messages: DATA frames, as far as the client's windows reach.

nghttp2 has a structure of some hundred bytes for each stream and walks to it twice for a token; a step touches those of
hundreds of streams, none of which is in the cache any more. Here a step is one list of bytes.

A call's messages leave one after the other (`send`). A stream that gets a chunk of always the same size with every step
can go by the express way (`board`, `express`): then nothing is looked up for a token, and what its window lost is
settled when somebody has to know, from the number of chunks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING

from bridge.grpc.sieve import DEFAULT_WINDOW

if TYPE_CHECKING:
    from bridge.grpc.call import Call

# Every client takes frames of this size (SETTINGS_MAX_FRAME_SIZE's least value).
FRAME_BYTES = 16384
HEADER_BYTES = 9
NOTHING = bytearray()
# No flight has more chunks than this, and all are settled at least this often.
LONGEST_FLIGHT = 1 << 20

_header = struct.Struct(">BHBBI")


def data_header(size: int, stream_id: int) -> bytes:
    """The header of a DATA frame of ``size`` bytes, at most FRAME_BYTES, that does not end its stream."""
    return _header.pack(0, size, 0, 0, stream_id)


class Flight:
    """A call on the express way: each time ``chunks`` grows by one, one chunk of ``size`` bytes was sent on it.

    ``on_full`` is called when its window has no room for another one: the flight has been settled then, and is over.
    """

    __slots__ = ("call", "chunks", "name", "on_full", "settled", "size")

    def __init__(self, name: str, call: Call, size: int, chunks: Sized, on_full: Callable[[Flight], None]) -> None:
        self.name = name
        self.call = call
        self.size = size
        self.chunks = chunks
        self.on_full = on_full
        self.settled = len(chunks)

    @property
    def steps(self) -> int:
        """How many chunks more it may send; exact only when it is settled."""
        return min(self.call.credit // self.size, LONGEST_FLIGHT - len(self.chunks))

    def settle(self) -> None:
        """Take what was sent off the call's window."""
        count = len(self.chunks)
        self.call.credit -= (count - self.settled) * self.size
        self.settled = count


class Outflow:
    """The sending half of one connection. ``window`` is what the client still lets it send, over all streams."""

    __slots__ = ("_flights", "_mark_dirty", "_out", "_steps_left", "step_bytes", "waiting", "window")

    def __init__(self, mark_dirty: Callable[[], None]) -> None:
        self.window = DEFAULT_WINDOW
        # Calls whose messages wait: for their headers to be out, or for a window.
        self.waiting: dict[Call, None] = {}
        self._mark_dirty = mark_dirty
        self._out: list[bytes] = []
        self._flights: dict[Call, Flight] = {}
        # What the flights send in a step, all together.
        self.step_bytes = 0
        # Steps that every flight's window has room for.
        self._steps_left = LONGEST_FLIGHT

    def send(self, call: Call, message: bytes) -> None:
        """Send a framed message of a call that is in no flight, or keep what does not fit; blocks the call then."""
        size = len(message)
        if call.framed and not call.unsent and size <= call.credit and size <= self.window and size <= FRAME_BYTES:
            self._out += (data_header(size, call.stream_id), message)
            self.window -= size
            call.credit -= size
        elif call.unsent:
            call.unsent += message
        else:
            call.unsent = bytearray(message)
            self.waiting[call] = None
        if call.credit <= len(call.unsent):
            call.block()
        self._mark_dirty()

    def put(self, frames: bytes) -> None:
        """Send frames of other kinds behind what was sent so far."""
        if frames:
            self._out.append(frames)

    def take(self) -> list[bytes]:
        """The bytes of what was sent since the last time."""
        out, self._out = self._out, []
        return out

    def pump(self) -> bool:
        """Send what waits and has room now, a frame of each call in turn; whether that ended one (see Call.emptied)."""
        ended = False
        turn = list(self.waiting)
        while turn and self.window > 0:
            moved: list[Call] = []
            for call in turn:
                size = min(len(call.unsent), call.credit, self.window, FRAME_BYTES)
                if size <= 0 or not call.framed:
                    continue
                self._out += (data_header(size, call.stream_id), bytes(call.unsent[:size]))
                del call.unsent[:size]
                self.window -= size
                call.credit -= size
                del self.waiting[call]
                if call.unsent:
                    # Behind the others, who are first when the window grows.
                    self.waiting[call] = None
                    moved.append(call)
                else:
                    ended |= call.emptied()
            turn = moved
        for call in self.waiting:
            call.block()
        return ended

    def drop(self, call: Call) -> None:
        """The call's stream is closed: nothing more can be sent on it."""
        self.waiting.pop(call, None)
        call.unsent = NOTHING
        call.framed = False

    # The express way

    def board(self, flight: Flight) -> bytes | None:
        """Let a call fly; returns the header that goes before each of its chunks, None if it has to go on foot."""
        call, size = flight.call, flight.size
        if call.blocked or not call.framed or call.unsent or size > FRAME_BYTES or call in self._flights:
            return None
        steps = flight.steps
        if steps <= 0:
            return None
        self._flights[call] = flight
        self.step_bytes += size
        self._steps_left = min(self._steps_left, steps)
        return data_header(size, call.stream_id)

    def land(self, flight: Flight) -> None:
        """End a flight."""
        if self._flights.get(flight.call) is flight:
            flight.settle()
            del self._flights[flight.call]
            self.step_bytes -= flight.size

    @property
    def has_room(self) -> bool:
        """Whether every flight's next chunk fits."""
        return self.window >= self.step_bytes

    def express(self, chunks: bytes, count: int) -> None:
        """Send one chunk of each of ``count`` flights, with their headers; they have grown by it already."""
        self._out.append(chunks)
        self.window -= len(chunks) - HEADER_BYTES * count
        self._steps_left -= 1
        if self._steps_left <= 0:
            self.settle()
        self._mark_dirty()

    def settle(self) -> None:
        """Settle every flight, and end those that have no room for another chunk."""
        steps = LONGEST_FLIGHT
        for flight in list(self._flights.values()):
            flight.settle()
            left = flight.steps
            if left <= 0:
                self.land(flight)
                flight.on_full(flight)
            else:
                steps = min(steps, left)
        self._steps_left = steps

    def credit(self, call: Call) -> int:
        """The call's window, less what was sent on a flight so far."""
        flight = self._flights.get(call)
        if flight is not None:
            flight.settle()
        return call.credit
