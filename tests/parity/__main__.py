"""`python -m tests.parity --tokenizer MODEL_DIR NAME=ADDRESS …`: compare servers that run; exit code 1 when they differ."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tokenizers import Tokenizer

from tests.parity.cases import CASES
from tests.parity.compare import compare
from tests.parity.speakers import SPEAKERS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model folder")
    parser.add_argument("--no-seed", action="store_true", help="leave out cases with a seed")
    parser.add_argument("speakers", nargs="+", metavar="NAME=ADDRESS", help="NAME is one of: " + ", ".join(SPEAKERS))
    given = parser.parse_args()
    named = dict(word.split("=", 1) for word in given.speakers)
    unknown = sorted(set(named) - set(SPEAKERS))
    if unknown:
        parser.error(f"no speaker is called {', '.join(unknown)}; known: {', '.join(SPEAKERS)}")
    cases = [case for case in CASES if not (given.no_seed and case.seed is not None)]
    speakers = {name: SPEAKERS[name](address) for name, address in named.items()}
    found = compare(speakers, cases, Tokenizer.from_file(str(given.tokenizer / "tokenizer.json")))
    for (one, other), lines in found.items():
        print(f"{one:24} {other:24} {len(cases) - len(lines)} of {len(cases)} equal")
        for line in lines:
            print(f"    {line}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
