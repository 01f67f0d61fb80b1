"""What every speaker is asked: only what each of them can say."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.gateways import chat_text


@dataclass(frozen=True)
class Case:
    """One request. Zeros and empty fields are "not asked"; without `temperature` it is greedy."""

    name: str
    prompt: str
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    seed: int | None = None
    """Not for engines whose contracts have none."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = field(default=False)


PARIS = chat_text("What is the capital of France?")
PROMPTS = {
    "story": "Once upon a time, in a village by the sea,",
    "code": "def fibonacci(n):\n    ",
    "french": "La capitale de la France",
    "numbers": "1, 1, 2, 3, 5, 8,",
    "emoji": "Emoji: 😀😃😄😁",
}

CASES = (
    *(Case(f"greedy {name}", prompt, 20) for name, prompt in PROMPTS.items()),
    *(Case(f"as good as greedy {name}", prompt, 12, temperature=0.8, top_k=1) for name, prompt in PROMPTS.items()),
    *(
        Case(f"penalties {name}", prompt, 14, frequency_penalty=1.5, presence_penalty=-0.5)
        for name, prompt in PROMPTS.items()
    ),
    *(
        Case(f"sampled {name}", prompt, 14, temperature=0.9, top_p=0.9, seed=seed)
        for seed, (name, prompt) in enumerate(PROMPTS.items(), 40)
    ),
    Case("to the end", PARIS, 40),
    Case("past the end", PARIS, 14, ignore_eos=True),
    Case("a stop string", PARIS, 40, stop=("France",)),
    Case("a stop string inside a token", PARIS, 40, stop=("ari", "never")),
    Case("a stop string over tokens", PARIS, 40, stop=("is Par",)),
    Case("a stop id", PARIS, 40, stop_token_ids=(7042,)),
    Case("one token", PARIS, 1),
)
