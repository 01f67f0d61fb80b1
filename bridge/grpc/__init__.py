"""The gRPC server: HTTP/2 on nghttp2, one write per connection per engine step.

status, metadata, framing   the gRPC protocol as values and bytes
service                     what a contract hands in: services and methods
call                        what a handler answers with; ``send`` is the hot path
connection                  one HTTP/2 connection (the only module that knows nghttp2), with its
inlet, intake               input: bytes in turns; header blocks into calls, bytes into messages
floods, patience            limits on control frames and on time
dispatch, deadlines         running handlers; one timer for every deadline
server, limits, stats, tls  listeners, flush and drain; every limit; counters; TLS contexts
"""
