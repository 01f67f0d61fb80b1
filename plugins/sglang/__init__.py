"""Runs inside SGLang's processes: gives its scheduler a ZMQ lane in place of the tokenizer manager.

Read against 0.5.18 to 0.5.23, run with 0.5.23.

entry      what SGLang loads in each of its processes; inert unless the launcher asked for it
hooks      the seams of the scheduler we take hold of
lane       one rank's lane: requests in, outputs out, on the scheduler's own loop
dial       the handshake and the sockets, seen from the engine
intake     request frames → the scheduler's native requests, checked as the tokenizer manager would
guarded    those checks
slim       the scheduler's output structs → slim messages, columns positional
ready      the ready map: what the rank tells about itself
lastword   ENGINE_CORE_DEAD on every end this process can see
launcher   `python -m bridge.plugins.sglang.launcher`: the ranks, on SGLang's own spawner
companion  the facts, from SGLang's own configuration

front end ROUTER ──ADD, ABORT, CONTROL──▶ DEALER  rank  PUSH ──slim batches, replies, death──▶ front end PULL
"""
