"""What serving costs, beside the peers: the same engine, wire and client in front of and behind every server.

make bench                                  everything; bench.json, docs/benchmark.png
python -m tests.bench.bench --quick         a look in about a minute
python -m tests.bench.bench --only cpu_token_256,admission

bench       the command: runs the cells in turn on every server, several times, and judges the targets
cells       what is measured, and how a figure comes out of it
servers     the servers: how each is started, which processes are its own
serve       `headless-bridge serve sim` with `engine` in the simulated engine's place
engine      an engine on vLLM's wire that costs next to nothing; each of its tokens is the number of its step
pulse       the page of memory through which the bench paces `engine` and learns when each step left
client      the load client, in a process of its own; `http2` its connection, `speech` the two contracts it speaks
admission   what a request costs the front end from its last byte to the engine's socket
process     CPU time and memory of processes
targets     the figures that must come out
report      the table and bench.json; `plot` the picture
peers/      two servers to compare with: SMG's Rust servicer, and the least grpc.aio servicer that works
"""
