"""The shortest client: grpcio and the contract's own stubs (`pip install grpcio smg-grpc-proto`).

    headless-bridge serve sim .models/tiny-llama --port 50051
    python examples/grpc_client/ask.py 127.0.0.1:50051 "Once upon a time"

The worker tokenizes the text and answers in token ids: one line a chunk, then how it ended.
"""

from __future__ import annotations

import sys

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc


def main(address: str, text: str) -> int:
    sampling = pb.SamplingParams(temperature=0, max_tokens=8)
    request = pb.GenerateRequest(text=text, sampling_params=sampling, stream=True)
    with grpc.insecure_channel(address) as channel:
        try:
            for reply in pb_grpc.VllmEngineStub(channel).Generate(request, timeout=60):
                if reply.HasField("chunk"):
                    print("tokens", *reply.chunk.token_ids, flush=True)
                else:
                    end = reply.complete
                    print(f"{end.finish_reason}: {end.prompt_tokens} tokens in, {end.completion_tokens} out")
        except grpc.RpcError as error:
            print(f"error: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
