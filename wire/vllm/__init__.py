"""vLLM's engine-core wire, 0.27 to 0.33.

    layouts.py    field order of the positional structs, per version
    requests.py   bridge → engine: [type byte] [msgpack] [tensor frames]; ADD 00, ABORT 01, UTILITY 03
    sampling.py   SamplingParams, a map, and the EOS ids that vLLM's front end would fill in
    outputs.py    engine → bridge: EngineCoreOutputs [msgpack] [tensor frames], one a step; deltas, ends, logprobs
    control.py    the ready map, statistics, utility replies, the frame ENGINE_CORE_DEAD
    rules.py      what a request may hold, for the guard
    codec.py      all of it as `bridge.wire.codec.Codec`

Positional structs may end early (defaults follow) or go on (unknown elements follow); maps may have unknown keys. The
engine believes whatever it reads: what its decoder refuses ends its input thread without a word to anybody.
"""
