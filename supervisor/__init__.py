"""Process lifecycle: spawn, watch, drain, and the control channel to the front end.

tree        one run of `serve`: what is started in which order, and how it ends; `config` is its input
listeners   sockets bound once, inherited by front ends            state        the folder with slots and locks
engine_link handshake, slot 0 and the slots nobody uses            engine_run   one life of the engine
front_ends  the one that serves, is replaced, is upgraded          front_end    one of them: its process and its words
ledger      wire ids in flight, in memory that outlives a kill     liveness     whether an engine that is there works
warm_up     one token before anybody is told                       commands     orders over a socket: `reload`
engines/    how each engine is launched                            companion    code in the engine's Python, kept running
process     one child: spawned, relayed, watched, stopped whole    vitals       an engine's inner processes
lifeline    keeps the leash: `leash` and `parent_death` are scripts that run without the rest of the bridge
ready       start-up progress and its limits; `status_line` shows it on a terminal
control     the messages to and from a front end; `channel` carries them
policy      what follows an end that nobody asked for              errors       reasons, log tails, exit codes
"""
