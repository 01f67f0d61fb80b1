"""SMG's Rust servicer of vllm.grpc.engine, from the smg wheel: `python rust.py PORT HANDSHAKE_ADDRESS IPC_BASE VOCABULARY`."""

from __future__ import annotations

import sys
import time

from smg.servicer import VllmGrpcServer


def main(port: str, handshake: str, ipc_base: str, vocabulary: str, tokenizer_dir: str) -> int:
    server = VllmGrpcServer(
        f"127.0.0.1:{port}",
        f"ipc://{ipc_base}",
        handshake,
        "bench",
        max_context_length=131072,
        vocab_size=int(vocabulary),
        eos_token_ids=[2],
        model_dtype="bfloat16",
        block_size=16,
        max_num_seqs=16384,
        log_stats=False,
        tokenizer_dir=tokenizer_dir,
    )
    server.set_serving(True)
    while server.last_error is None:
        time.sleep(5)
    print(server.last_error, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
