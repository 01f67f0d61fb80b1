"""What makes a companion stay: it answers checks on a unix socket, each in a process that may be lost.

    server ──▶ pool ──▶ worker (forked, limited in CPU time and memory, replaced when it dies)

A companion imports its engine's code once, then gives `serve` a judge: a function from a `Check` to a `Verdict`. The
judge runs in workers only, so whatever a constraint does to the engine's code (spin, allocate, crash), the companion
answers the next one. Nothing here knows an engine.
"""
