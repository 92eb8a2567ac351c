"""The published claims that a study tests: its key `claims`, read and checked."""

import re
from typing import Any

from ...core.errors import LabError, did_you_mean, must_be
from ...core.ranges import POSITIVE, Range
from ...evaluation.metrics import METRICS, better_of
from .parts import check_keys, list_of
from .spec import CONSISTENCY, SPEEDUP, Claim, StudySpec, controlled

BETTER, WORSE, NO_WORSE, NO_DIFFERENCE = EXPECTATIONS = ("better", "worse", "no worse", "no difference")
_KEYS = ("claim", "source", "arm", "against", "metric", "expects", "by", "within", "note")
_FACTOR, _SHARE = Range("(1, inf)"), Range("(0, 1)")
_LONGEST = 200  # characters of a text
_ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
_SOURCES = re.compile(rf'{_ARXIV.pattern}|doi:10\.\S+|https://\S+|"[^"\n]+"')


def link_of(source: str) -> str | None:
    """The address of a source, if it has one."""
    if found := _ARXIV.fullmatch(source):
        return f"https://arxiv.org/abs/{found[1]}"
    if source.startswith("doi:"):
        return f"https://doi.org/{source.removeprefix('doi:')}"
    return source if source.startswith("https:") else None


def read_claims(value: Any, spec: StudySpec) -> tuple[Claim, ...]:
    """The claims of a study file; raises a `LabError` for one that the comparisons of the study cannot decide."""
    claims = []
    for fields in [] if value is None else list_of(value, "claims"):
        claim = _read(fields, spec.baseline)
        of = f"the claim {claim.claim!r}"
        _check_pair(claim, spec, of)
        _check_metric(claim, spec, of)
        _check_expectation(claim, of)
        claims.append(claim)
    return tuple(claims)


def _read(fields: Any, baseline: str) -> Claim:
    if not isinstance(fields, dict):
        raise must_be("claims", fields, "a list of mappings", f"the keys of each are {', '.join(_KEYS)}")
    check_keys(fields, _KEYS, "claims")
    text = fields.get("claim")
    if not isinstance(text, str) or not text.strip() or len(text) > _LONGEST:
        raise must_be("claim", text, f"a sentence of up to {_LONGEST} characters", "it is what the source says")
    of = f"the claim {text!r}"
    for key in ("source", "arm", "metric", "expects"):
        if not isinstance(fields.get(key), str):
            raise must_be(key, fields.get(key), "text", f"every claim has {key}", of=of)
    for key in ("against", "note"):
        if key in fields and not isinstance(fields[key], str):
            raise must_be(key, fields[key], "text", "leave it out if there is none", of=of)
    if not _SOURCES.fullmatch(fields["source"]):
        wanted = "arXiv NUMBER, doi:10.NUMBER, an address (https://...), or a title in quotation marks"
        raise must_be("source", fields["source"], wanted, "such as 'arXiv 2405.18392'", of=of)
    against = fields["arm"] if fields["metric"] == CONSISTENCY else baseline
    return Claim(**{"against": against, **fields})


def _check_pair(claim: Claim, spec: StudySpec, of: str) -> None:
    arms, baseline, pairs = spec.arms, spec.baseline, controlled(spec.arms)
    for key in ("arm", "against"):
        if (name := getattr(claim, key)) not in arms:
            raise LabError(f"{key} {name!r} of {of} is not an arm.{did_you_mean(name, arms)} They are {', '.join(arms)}.")
    arm, against = claim.arm, claim.against
    if claim.metric == CONSISTENCY:
        return
    if arm == against:
        raise must_be("arm", arm, "another arm than the one that it is compared with", f"that is {against}", of=of)
    if baseline not in (arm, against) and not {(arm, against), (against, arm)} & {*pairs}:
        hint = f"only tested pairs decide a claim: give {arm} controls: [{against}]"
        raise must_be("against", against, f"the baseline ({baseline}) or a control of {arm}", hint, of=of)
    if claim.metric == SPEEDUP and (arm == baseline or (against, arm) in pairs):
        raise must_be("arm", arm, f"the arm that is compared with {against}", "a speed-up is measured for that arm", of=of)


def _check_metric(claim: Claim, spec: StudySpec, of: str) -> None:
    if claim.metric == CONSISTENCY:
        return
    if claim.metric == SPEEDUP:
        if spec.speedup_metric is None:
            raise must_be("metric", SPEEDUP, "a metric of the study", "give the study a speedup_metric", of=of)
        return
    known = spec.metrics or tuple(METRICS)
    if claim.metric not in known:
        also = f"{', '.join(known)}, {SPEEDUP} or {CONSISTENCY}"
        hint = did_you_mean(claim.metric, known).strip() or "add it to metrics"
        raise must_be("metric", claim.metric, f"a metric of the study: {also}", hint, of=of)
    if better_of(claim.metric) == "neither":
        raise must_be("metric", claim.metric, "a metric with a better direction", "neither is better here", of=of)


def _check_expectation(claim: Claim, of: str) -> None:
    allowed = {SPEEDUP: (BETTER,), CONSISTENCY: (NO_DIFFERENCE,)}.get(claim.metric, EXPECTATIONS)
    if claim.expects not in allowed:
        raise must_be("expects", claim.expects, " or ".join(allowed), f"the metric is {claim.metric}", of=of)
    needed, other = ("within", "by") if claim.expects in (NO_WORSE, NO_DIFFERENCE) else ("by", "within")
    if getattr(claim, other) is not None:
        raise LabError(f"{other} of {of} has no effect on expects: {claim.expects}. Give {needed}, or leave it out.")
    if needed == "within" and claim.within not in _SHARE:
        hint = "the largest difference that counts as none, as a share of the other arm's mean, such as 0.05"
        raise must_be("within", claim.within, str(_SHARE), hint, of=of)
    numbers = _FACTOR if claim.metric == SPEEDUP else POSITIVE
    if claim.by is not None and claim.by not in numbers:
        raise must_be("by", claim.by, str(numbers), "the smallest effect that the source claims", of=of)
