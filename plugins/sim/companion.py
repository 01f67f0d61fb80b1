"""The simulated engine's companion: `python -m bridge.plugins.sim.companion facts -- [engine arguments]`.

Prints one `bridge.wire.companion.Facts` as JSON, the last line of standard output. Takes the engine's own arguments, so
both agree on the model. Exit code 2 and one line on standard error when they cannot be used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from bridge.plugins.sim.model import facts_of
from bridge.plugins.sim.options import OptionsError, parse

USAGE = "usage: python -m bridge.plugins.sim.companion facts -- [engine arguments]"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] != "facts" or (len(arguments) > 1 and arguments[1] != "--"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        facts = facts_of(parse(arguments[2:]))
    except OptionsError as error:
        print(f"sim companion: {error}", file=sys.stderr)
        return 2
    sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
