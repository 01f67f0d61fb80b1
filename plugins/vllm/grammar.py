"""Judges constraints with vLLM's own code: what its front end would refuse, rewrite, and choose as the backend.

`SamplingParams._validate_structured_outputs` (vLLM 0.27 to 0.33) does all three from the model configuration, the
structured-outputs configuration and the tokenizer. With the backend `auto` it tries xgrammar, then guidance or outlines.
The engine core enforces everything with the backend of the first constraint it sees, whatever a later one names: an
xgrammar engine ignores what made vLLM choose guidance. So once there is a backend, a constraint is validated for that one.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

from bridge.plugins.resident.worker import Judge
from bridge.plugins.vllm.facts import Loaded
from bridge.plugins.vllm.installed import CompanionError, named, one_line
from bridge.plugins.vllm.trial import CostError, Trial
from bridge.wire.companion import Accepted, Cause, Check, Refused, Verdict

AUTO = "auto"

FIELDS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
    "structural_tag": "structural_tag",
}
"""Our word for a constraint → its field in StructuredOutputsParams."""

KINDS = {field: kind for kind, field in FIELDS.items()}

SETTINGS = {"VLLM_REGEX_COMPILATION_TIMEOUT_S": "0", "VLLM_XGRAMMAR_CACHE_MB": "8", "LLGUIDANCE_LOG_LEVEL": "0"}
"""The worker's limits take the place of vLLM's own, which leave a thread behind; verdicts are cached, not grammars."""

MAX_REASON = 400

PLAIN = ("VLLMValidationError", "ValueError", "CostError", "CompanionError")
"""Exceptions that say all in their text."""


def judge_for(loaded: Loaded) -> Judge:
    """What judges constraints for this engine. Builds the likely backend, so that workers share it."""
    if loaded.facts.skip_tokenizer_init:
        return _Unable(
            "vLLM enforces constraints with a tokenizer, and this engine was started with skip_tokenizer_init"
        )
    regex_limit_s = float(named("vllm", "envs").VLLM_REGEX_COMPILATION_TIMEOUT_S)
    os.environ.update(SETTINGS)
    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it logs whole grammars; the verdict says what matters
    try:
        judge = VllmJudge(loaded, regex_limit_s)
        judge.prepare()
    except CompanionError as error:
        return _Unable(one_line(error))
    return judge


@dataclasses.dataclass(frozen=True)
class _Unable:
    """Judges for an engine that enforces nothing."""

    reason: str

    def __call__(self, check: Check) -> Verdict:
        return Refused(id=check.id, cause=Cause.UNABLE, reason=self.reason)


class _RefusedError(Exception):
    """One verdict, on its way out."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


class VllmJudge:
    """Everything that vLLM's validation takes, for one engine."""

    def __init__(self, loaded: Loaded, regex_limit_s: float) -> None:
        self._model = loaded.model
        self._config = loaded.engine_args.structured_outputs_config
        self._tokenizer = named("vllm.tokenizers", "cached_tokenizer_from_config")(loaded.model)
        self._sampling_params = named("vllm.sampling_params", "SamplingParams")
        self._constraint = named("vllm.sampling_params", "StructuredOutputsParams")
        if not hasattr(self._sampling_params, "_validate_structured_outputs"):
            raise CompanionError(
                f"vLLM {loaded.facts.engine_version} lacks SamplingParams._validate_structured_outputs; "
                "known to work: 0.27 to 0.33"
            )
        self._trial = Trial(
            loaded.model, self._tokenizer, self._config, loaded.engine_args.speculative_config, regex_limit_s
        )

    def prepare(self) -> None:
        """Load the backend that most constraints will need."""
        self._trial.backend("xgrammar" if self._config.backend == AUTO else self._config.backend)

    def __call__(self, check: Check) -> Verdict:
        try:
            params = self._validated(check)
            self._trial.run(params)
            kind, value = self._rewritten(params)
        except _RefusedError as refused:
            return Refused(id=check.id, cause=refused.cause, reason=str(refused))
        except (CostError, MemoryError) as error:
            return Refused(id=check.id, cause=Cause.COST, reason=_reason(error))
        except CompanionError as error:
            return Refused(id=check.id, cause=Cause.UNABLE, reason=_reason(error))
        except Exception as error:  # vLLM's code under a hostile constraint raises anything
            return Refused(id=check.id, cause=Cause.INVALID, reason=_reason(error))
        auto = self._config.backend == AUTO
        return Accepted(id=check.id, kind=kind, value=value, backend=params._backend, backend_was_auto=auto)

    def _validated(self, check: Check) -> Any:
        """StructuredOutputsParams as vLLM's front end would send it; raises what vLLM raises, or `_RefusedError`."""
        latched = check.backend
        if not latched or self._config.backend != AUTO:
            return self._validate(check, self._config)
        try:
            return self._validate(check, dataclasses.replace(self._config, backend=latched))
        except Exception as error:
            chosen = self._validate(check, self._config)._backend
            raise _RefusedError(
                Cause.BACKEND, f"it needs the backend {chosen}; {latched} answers: {_reason(error)}"
            ) from None

    def _validate(self, check: Check, config: Any) -> Any:
        params = self._sampling_params(structured_outputs=self._constraint(**{FIELDS[check.kind]: check.value}))
        try:
            params._validate_structured_outputs(
                model_config=self._model, structured_outputs_config=config, tokenizer=self._tokenizer
            )
        except ImportError as error:
            raise CompanionError(f"the backend {config.backend} is not installed: {error}") from None
        return params.structured_outputs

    def _rewritten(self, params: Any) -> tuple[str, Any]:
        """The one constraint that is set now; vLLM turns a choice into a grammar for xgrammar."""
        given = {
            field.name: getattr(params, field.name)
            for field in dataclasses.fields(params)
            if not field.name.startswith("_") and getattr(params, field.name) != field.default
        }
        if len(given) != 1 or not given.keys() <= KINDS.keys():
            raise CompanionError(f"vLLM's own validation asks for {', '.join(given)} together, which is not known here")
        ((name, value),) = given.items()
        return KINDS[name], value


def _reason(error: BaseException) -> str:
    text = one_line(error)
    if type(error).__name__ not in PLAIN:
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 1] + "…"
