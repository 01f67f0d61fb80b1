"""The lane that the bridge's plugin, or SMG's, gives SGLang's scheduler: 0.5.18 to 0.5.23.

    layouts.py    field order of the positional structs, as the engine's ready map declares it
    requests.py   bridge → engine: [type byte] [msgpack] [metadata]; ADD 00, ABORT 01, CONTROL 02
    sampling.py   SamplingParams, positional
    outputs.py    engine → bridge: one tagged array a message: token columns, embedding columns, control replies
    control.py    the frame ENGINE_CORE_DEAD
    rules.py      what a request may hold, for the guard
    codec.py      all of it as `bridge.wire.codec.Codec`

Requests are the scheduler's own structs, whose fields move between releases, so their order is read from the engine.
Outputs are the lane's own and grow at the end only. The scheduler keeps its tokenizer: EOS ids and stop strings are
matched there. A request it refuses comes back as an abort with a status.
"""
