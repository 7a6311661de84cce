"""Bounds and stops: Keel's own certificate, walk-backs and early stops."""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.measures import onset_of, percent, share_of
from keel.doctor.run_log import RunLog
from keel.doctor.series import align

ROUNDING = 1e-9
"""What float64 may add to a mean KL that was measured to be inside of its bound."""
MOST = 0.5
TRACES, PARTS = 0.25, 0.6
"""Median share of the step that was kept: below, an update is mostly thrown away."""
LEAST = 8


@rule(
    "certificate-broken",
    "trust region",
    needs=("train/kl_exact", "train/max_kl"),
    source="Keel's promise: kl_exact ≤ max_kl after every update",
)
def certificate_broken(log: RunLog) -> Finding | None:
    """Find an update beyond the bound that was certified: it must never happen."""
    if log.framework != "keel" or log.settings.get("region.certify") is False:
        return None
    kl, bound = align(log["train/kl_exact"], log["train/max_kl"])
    outside = kl.values > bound.values * (1.0 + 1e-6) + ROUNDING
    if not outside.any() or not _enforced(log):
        return None
    at = int(np.flatnonzero(outside)[-1])
    return Finding(
        cause=f"the certificate is broken: the exact KL is {kl.values[at]:.6g} nats, its hard "
        f"bound {bound.values[at]:.6g}; this must never happen, please report it",
        level="sick",
        evidence=(
            evidence(
                kl,
                f"{kl.values[at]:.6g} > {bound.values[at]:.6g}, in {int(outside.sum())} of "
                f"{len(kl)} updates",
                float(kl.values[at]),
                threshold=float(bound.values[at]),
                source="Keel measures the KL after every update and walks back what is over",
                onset=onset_of(kl, outside),
            ),
        ),
        others=(
            Suspect(
                "the run was trained with region.certify off, and the log does not say so",
                "look at region.certify in its config.yaml",
            ),
            Suspect(
                "the metrics were edited or merged from several runs",
                "keel runs verifies the checksums of the lines",
            ),
        ),
        fix=Fix(
            "Keep the run and report it; do not use its policy.",
            (Change("region.certify", to=True),),
        ),
        confidence=0.9,
    )


def _enforced(log: RunLog) -> bool:
    """Return whether certification was on: the settings say so, or steps were walked back."""
    if log.settings.get("region.certify") is True:
        return True
    alpha = log.get("train/alpha")
    return alpha is not None and bool((alpha.values < 1.0).any())


@rule(
    "kl-estimated",
    "trust region",
    needs=("train/kl_is_exact",),
    source="Keel: where no closed form exists, certification refuses",
)
def kl_estimated(log: RunLog) -> Finding | None:
    """Find a KL that is called exact and is an estimate."""
    exact = log["train/kl_is_exact"]
    outside = exact.values < 1.0
    if share_of(outside) < MOST:
        return None
    return Finding(
        cause="the KL of the updates is an estimate: the distribution of the actions has no closed "
        "form, so nothing bounds the true one",
        level="watch",
        evidence=(
            evidence(
                exact,
                f"{exact.last:g} in {percent(share_of(outside))} of the updates",
                threshold=1.0,
                source="registry: an estimate certifies nothing",
                onset=onset_of(exact, outside),
            ),
        ),
        others=(
            Suspect(
                "a distribution of your own has no method `kl`",
                "give it one: train/kl_is_exact becomes 1",
            ),
        ),
        fix=Fix("Use a distribution whose KL has a closed form, or give yours the method `kl`."),
        confidence=0.9,
    )


@rule(
    "walk-backs-frequent",
    "trust region",
    needs=("train/alpha",),
    source="Keel: α is the share of the step that was kept",
    rows=LEAST,
)
def walk_backs_frequent(log: RunLog) -> Finding | None:
    """Judge updates that are walked back most of the time: by how much?"""
    alpha = log["train/alpha"]
    back = alpha.values < 1.0
    if share_of(back) <= MOST or "train/line_search_success" in log:
        return None
    kept = alpha.median()
    requested = log.get("train/kl_requested")
    told = "" if requested is None else f"; they ask for {requested.median():.3g} nats"
    level = "sick" if kept < TRACES / 5 else "watch" if kept < TRACES else "usual"
    cause = (
        f"steps are much too long for the bound: {percent(share_of(back))} of the updates are "
        f"walked back, to {percent(kept)} of their step{told}; the work of the rest is thrown away"
        if level != "usual"
        else f"the bound works: {percent(share_of(back))} of the updates are walked back to it, "
        f"and keep {percent(kept)} of their step"
    )
    return Finding(
        cause=cause,
        level=level,  # type: ignore[arg-type]
        evidence=(
            evidence(
                alpha,
                f"below 1 in {percent(share_of(back))} of {len(alpha)} updates, median {kept:.3g}",
                kept,
                threshold=TRACES,
                source="Keel: a quarter of the step is less than one epoch of four",
                onset=onset_of(alpha, back) if level != "usual" else None,
            ),
        ),
        others=(
            Suspect(
                "the bound is tight on purpose",
                "double max_kl: fewer updates are walked back, with the same return",
            ),
        )
        if level != "usual"
        else (),
        fix=Fix(
            "Lower the learning rate until most updates are kept whole.",
            (Change("region.learning_rate", times=0.3),),
        )
        if level != "usual"
        else Fix(
            f"Nothing; {'a little' if kept > PARTS else 'half'} less learning rate saves time."
        ),
        confidence=0.7,
    )


@rule(
    "early-stop-at-once",
    "trust region",
    needs=("train/early_stop_epoch", "setting:region.epochs"),
    source="SB3, Spinning Up: updates that stop in their first epoch",
    rows=LEAST,
)
def early_stop_at_once(log: RunLog) -> Finding | None:
    """Find updates that stop in their first epoch, most of the time."""
    stopped, epochs = log["train/early_stop_epoch"], log.setting("region.epochs") or 0.0
    at_once = stopped.values == 0.0
    share = float(at_once.sum()) / max(log.rows, 1)
    if epochs < 2 or share < 0.75:
        return None
    return Finding(
        cause=f"updates stop in their first epoch ({percent(share)} of them, of {epochs:g} "
        "epochs): the learning rate is too high for the target",
        level="watch",
        evidence=(
            evidence(
                stopped,
                f"epoch 0 in {int(at_once.sum())} of {log.rows} updates",
                0.0,
                threshold=0.75,
                source="an update should use more than one of its epochs",
                onset=onset_of(stopped, at_once),
            ),
        ),
        others=(
            Suspect("the target is tight on purpose", "double target_kl: more epochs are made"),
            Suspect(
                "the KL is above 0 before the first step",
                "log the ratio before the first step: it must be 1",
            ),
        ),
        fix=Fix(
            "Lower the learning rate, or plan fewer epochs.",
            (Change("region.learning_rate", times=0.3),),
        ),
        confidence=0.7,
    )
