"""What transformers makes of a prompt, greedily and in float32: `greedy.py MODEL IDS COUNT`, run in the engine's Python."""

from __future__ import annotations

import json
import sys


def main(model_path: str, prompt: str, count: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = json.loads(prompt)
    with torch.no_grad():
        for _ in range(int(count)):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    print(json.dumps(ids[-int(count) :]))


if __name__ == "__main__":
    main(*sys.argv[1:])
