"""Runs in vLLM's Python and lets its own decoders judge: `add HEX`, `outputs HEX` or `ready HEX` a line.

Answers `verdict ok`, `verdict error …`, or `verdict ` and the repr of what was read.
"""

from __future__ import annotations

import sys

import msgspec
from vllm.v1.engine import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder


def main() -> None:
    requests = MsgpackDecoder(EngineCoreRequest)
    outputs = MsgpackDecoder(EngineCoreOutputs)
    for line in sys.stdin:
        word, _, text = line.rstrip("\n").partition(" ")
        payload = bytes.fromhex(text)
        try:
            if word == "add":
                requests.decode([payload])
                verdict = "ok"
            elif word == "outputs":
                verdict = repr(outputs.decode([payload]))
            else:
                verdict = repr(msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse))
        except Exception as error:
            verdict = "error " + repr(error).replace("\n", " ")
        print("verdict", verdict, flush=True)


if __name__ == "__main__":
    main()
