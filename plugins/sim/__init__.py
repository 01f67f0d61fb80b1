"""A simulated engine on the real wire: for load, faults and machines with no engine.

    python -m bridge.plugins.sim --zmq-handshake-address tcp://127.0.0.1:P [--zmq-engine-index N] [options]

`options` command line · `model` what it pretends to serve · `tokens` the answers, as a function · `engine` the loop ·
`sockets`, `waiting` everything that blocks · `requests` strict decoding, and what kills or wedges · `scheduler`, `blocks`
who runs and who waits · `encode`, `versions` bytes of each vLLM release · `utilities` calls · `faults` failures on demand ·
`control` a test's way in past the front end · `companion` facts.
"""
