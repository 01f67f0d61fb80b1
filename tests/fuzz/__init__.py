"""A fuzzer for `vllm.grpc.engine.VllmEngine` workers, made from the contract's own descriptors.

    python -m tests.fuzz --target 127.0.0.1:50051 --requests 2000 --seed 7 --classes valid,near,hostile
    python -m tests.fuzz --judge vllm --requests 20000     no engine: every ADD is judged by vLLM's own classes

Three classes. `valid`: a worker must accept it, unless it asks for something that `refused.py` lists. `near`: values at and
just past a limit, and damaged bytes that still parse; any named answer will do. `hostile`: bytes that are no request, or a
request that holds at least one value an engine wedges on or dies of; nothing of it may reach an engine.

    encoding.py   protobuf bytes by hand, for what generated classes cannot say
    fields.py     values by field, valid and at the limits; everything else by type
    make.py       whole requests of one class, from descriptors
    poison.py     what kills or wedges vLLM, as bytes; ways to hide it; bytes that are no request
    cases.py      one numbered, reproducible case of a seed
    client.py     a gRPC client that sends exactly these bytes
    answers.py    what may come back, and what is a surprise
    report.py     the table and the reproducers
    live.py       a run against a worker
    captured.py   a front end in this process, with an engine that only records
    judged.py     a run against that, judged by vLLM's classes
    vllm_judge.py, vllm_python.py    those classes and the companion, in vLLM's Python
"""
