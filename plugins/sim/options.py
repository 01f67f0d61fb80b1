"""The simulated engine's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bridge.plugins.sim import faults, versions

PROGRAM = "python -m bridge.plugins.sim"

DESCRIPTION = """\
A simulated engine on the real vLLM engine-core wire. It dials a front end's handshake socket as
`vllm serve --headless` does and answers with deterministic tokens
(bridge.plugins.sim.tokens.expected_tokens tells a test which). It is as brittle as vLLM: what would
wedge or kill vLLM wedges or kills it (bridge.plugins.sim.requests lists it)."""

EPILOGUE = """\
faults (--fault KIND[:VALUE][@WHEN], repeatable):
{kinds}
  WHEN: ready (default), requests:N, steps:N, seconds:S, signal (SIGUSR1)
  `pydoc bridge.plugins.sim.faults` says what each does.

examples:
  {program} --zmq-handshake-address tcp://127.0.0.1:29550
  {program} --zmq-handshake-address tcp://127.0.0.1:29550 --step-ms 0 --max-num-seqs 4096
  {program} --zmq-handshake-address tcp://127.0.0.1:29550 --fault kill@steps:10
"""


class OptionsError(Exception):
    """What is wrong with the command line, in one line."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed command line. Fields that the model folder or the synthetic model decides are None when not given."""

    zmq_handshake_address: str | None
    zmq_engine_index: int
    wire_version: str
    model_path: Path | None
    served_model_name: str | None
    vocab_size: int | None
    max_model_len: int | None
    eos_token_id: int | None
    eos_after: int | None
    step_ms: float
    per_request_ms: float
    prefill_tps: float
    tokens_per_step: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_gpu_blocks: int
    block_size: int
    prefix_caching: bool
    log_stats: bool
    profiler: bool
    lora: bool
    load_seconds: float
    die_while_loading: bool
    init_timeout_s: float
    shutdown_timeout: float
    exit_with_parent: bool
    exit_delay_s: float
    control_address: str | None
    faults: list[faults.Fault]

    @property
    def release(self) -> tuple[int, int]:
        return versions.parse(self.wire_version)


def parser() -> argparse.ArgumentParser:
    """The argument parser; `parse` is what to call."""
    kinds = "\n".join(
        f"  {kind}" + ("" if default is None else f":{'off' if kind == 'stats' else format(default, 'g')}")
        for kind, default in faults.DEFAULTS.items()
    )
    made = argparse.ArgumentParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOGUE.format(kinds=kinds, program=PROGRAM),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    wire = made.add_argument_group("wire")
    wire.add_argument("--zmq-handshake-address", metavar="ADDRESS", help="where the front end's handshake listens")
    wire.add_argument(
        "--zmq-engine-index", type=int, default=0, metavar="N", help="global rank, the ZMQ identity (default 0)"
    )
    wire.add_argument(
        "--wire-version",
        default="0.32.0",
        metavar="V",
        help="vLLM release whose layouts are sent and reported, 0.27.0 to 0.33.0 (default 0.32.0)",
    )
    wire.add_argument(
        "--init-timeout-s", type=float, default=300.0, metavar="S", help="longest wait from HELLO to INIT (default 300)"
    )
    wire.add_argument("--disable-log-stats", dest="log_stats", action="store_false", help="no scheduler statistics")

    model = made.add_argument_group("model")
    model.add_argument(
        "--model-path",
        "--model",
        type=Path,
        metavar="DIR",
        help="model folder to take vocabulary, EOS and context length from",
    )
    model.add_argument("--served-model-name", metavar="NAME", help="only reported, by the companion")
    model.add_argument("--vocab-size", type=int, metavar="N", help="token ids known (default 32000, or the folder's)")
    model.add_argument(
        "--max-model-len", type=int, metavar="N", help="context, tokens (default 32768, or the folder's)"
    )
    model.add_argument("--eos-token-id", type=int, metavar="ID", help="EOS id (default 2, or the folder's)")
    model.add_argument("--eos-after", type=int, metavar="N", help="emit EOS as output number N, counted from 0")

    timing = made.add_argument_group("timing")
    timing.add_argument(
        "--step-ms", type=float, default=10.0, help="base duration of a step; 0: no timing model at all (default 10)"
    )
    timing.add_argument(
        "--per-request-ms", type=float, default=0.02, help="added for each request in the batch (default 0.02)"
    )
    timing.add_argument(
        "--prefill-tps", type=float, default=20000.0, help="prompt tokens computed a second; 0: free (default 20000)"
    )
    timing.add_argument("--tokens-per-step", type=int, default=1, help="tokens a request gets each step (default 1)")

    sizes = made.add_argument_group("sizes")
    sizes.add_argument("--max-num-seqs", type=int, default=1024, help="requests in the batch (default 1024)")
    sizes.add_argument("--max-num-batched-tokens", type=int, default=8192, help="tokens in a step (default 8192)")
    sizes.add_argument("--num-gpu-blocks", type=int, default=65536, help="KV blocks (default 65536)")
    sizes.add_argument("--block-size", type=int, default=16, help="tokens in a KV block (default 16)")
    sizes.add_argument(
        "--no-enable-prefix-caching", dest="prefix_caching", action="store_false", help="compute every prompt token"
    )

    life = made.add_argument_group("life and faults")
    life.add_argument("--load-seconds", type=float, default=0.0, help="time from INIT to READY, with log lines")
    life.add_argument("--die-while-loading", action="store_true", help="fail half-way through loading, exit code 1")
    life.add_argument("--fault", dest="faults", action="append", default=[], metavar="FAULT", help="see below")
    life.add_argument("--profiler", action="store_true", help="let the profile call succeed")
    life.add_argument("--enable-lora", dest="lora", action="store_true", help="take adapters; they change no token")
    life.add_argument(
        "--shutdown-timeout",
        type=float,
        default=0.0,
        metavar="S",
        help="on SIGTERM drain for at most S seconds, refusing new requests; 0: exit at once, no terminals (default)",
    )
    life.add_argument(
        "--exit-with-parent", action="store_true", help="exit when the process that started this one ends"
    )
    life.add_argument(
        "--exit-delay-s",
        type=float,
        default=0.0,
        help="from the death frame to the exit; vLLM takes 6 to 11 (default 0)",
    )
    life.add_argument(
        "--control-address",
        metavar="ADDRESS",
        help="ZMQ address to serve bridge.plugins.sim.control.SimControl on: state and faults past the front end",
    )
    return made


def parse(argv: Sequence[str]) -> Options:
    """The options in `argv`; exits for --help and for syntax, raises `OptionsError` for values that cannot be."""
    values = vars(parser().parse_args(argv))
    try:
        values["faults"] = [faults.parse(text) for text in values["faults"]]
        options = msgspec.convert(values, Options)
        versions.parse(options.wire_version)
    except ValueError as error:
        raise OptionsError(str(error)) from None
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "tokens_per_step"):
        if getattr(options, name) < 1:
            raise OptionsError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    for name in ("step_ms", "per_request_ms", "prefill_tps", "load_seconds", "shutdown_timeout", "exit_delay_s"):
        if getattr(options, name) < 0:
            raise OptionsError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it cannot be negative")
    if not 0 <= options.zmq_engine_index < 1 << 16:
        raise OptionsError(f"--zmq-engine-index is {options.zmq_engine_index}; it must fit two bytes")
    if options.max_num_seqs * options.tokens_per_step > options.max_num_batched_tokens:
        raise OptionsError(
            f"--max-num-batched-tokens {options.max_num_batched_tokens} is less than --max-num-seqs "
            f"{options.max_num_seqs} times --tokens-per-step {options.tokens_per_step}"
        )
    return options
