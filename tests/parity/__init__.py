"""One program that asks every way to an engine the same things: its own server, and each contract of the bridge.

`python -m tests.parity --tokenizer MODEL_DIR NAME=ADDRESS …` compares servers that run; tests call `compare`.

    speakers.py   one class a way to ask: engine's own HTTP servers and the contracts
    cases.py      what is asked
"""
