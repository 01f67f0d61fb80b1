"""Every limit of the server, with its default. A limit that is hit is counted in ``ServerStats.refusals``."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Rate:
    """A token bucket: ``burst`` events at once, refilled at ``per_second``."""

    burst: int
    per_second: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one server; sizes in bytes, times in seconds."""

    max_connections: int = 1024
    # SETTINGS_MAX_CONCURRENT_STREAMS of every connection.
    max_streams_per_connection: int = 4096
    # Calls from their headers to their status, over all connections. At the limit, the call whose request has been
    # incomplete the longest gives way to a new one.
    max_calls: int = 16384
    # Of them, client-streaming and endless ones: reflection, health watches, KV events.
    max_lasting_calls: int = 512
    # Ended calls whose last bytes their clients do not take. Above it, a client that has its part in it opens no more.
    max_lingering_calls: int = 8192
    # One request message, after decompression; images travel in requests.
    max_message_bytes: int = 64 * MIB
    # Request bytes received for calls whose request is not complete, and the metadata of open calls.
    max_buffered_bytes_per_connection: int = 256 * MIB
    max_buffered_bytes: int = 512 * MIB
    # Messages of one client-streaming call that wait for its handler.
    max_pending_messages: int = 256
    # SETTINGS_MAX_HEADER_LIST_SIZE; a call above it is refused, a block four times as large ends the connection.
    max_header_list_bytes: int = 16384
    max_header_fields: int = 128
    max_continuations: int = 8

    # Windows we offer: a 100,000-token prompt (300 kB) never waits for a WINDOW_UPDATE.
    stream_window_bytes: int = MIB
    connection_window_bytes: int = 16 * MIB
    # The transport pauses us above this many unsent bytes.
    write_buffer_bytes: int = MIB // 4

    # Gateways cancel by reset: every open stream at once must be allowed.
    resets: Rate = Rate(4096, 500)
    pings: Rate = Rate(2000, 200)
    settings: Rate = Rate(100, 10)
    # DATA frames of less than 16 bytes that do not end a request.
    tiny_data: Rate = Rate(1000, 100)
    # Besides two for each DATA frame that we send.
    window_updates: Rate = Rate(20000, 2000)

    # From accept (TLS handshake included) to a complete preface and SETTINGS.
    preface_s: float = 10.0
    # From a unary request's headers to its end.
    request_s: float = 120.0
    # Bytes that do not complete a frame.
    frame_s: float = 30.0
    # An unsent write buffer that does not shrink; a finished call whose last bytes the client does not take.
    slow_reader_s: float = 60.0
    # No bytes from a client for keepalive_s: PING; still none keepalive_timeout_s later: the connection is dead.
    keepalive_s: float = 60.0
    keepalive_timeout_s: float = 20.0
    # No call for this long: graceful GOAWAY. 0 never ends an idle connection (it still gives way at max_connections).
    idle_connection_s: float = 0.0
    backlog: int = 4096
