"""Measure every credit rule against the exact gradient of the sequence KL.

Prints the tables that stand in docs/math.md.

Run from the repository root, some seconds, same output every time:

    python -m scripts.credit_study            # print
    python -m scripts.credit_study --write    # replace the tables in docs/math.md
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.advantage import leave_one_out
from miniverl_dist.alignment.credit import CreditRule, Lookahead
from tests.reference.enumeration import (
    STUDY,
    Case,
    Weigh,
    episode_gradients,
    estimator_weights,
    expected_gradient,
    flow,
    growth,
    kl_gradient,
    noise,
    prefix_model,
    warm_case,
    weigher,
)

FloatArray = NDArray[np.float64]
SEEDS = range(10)
DOC = Path(__file__).resolve().parents[1] / "docs" / "math.md"
BEGIN, END = "<!-- credit_study: begin -->", "<!-- credit_study: end -->"
HORIZONS: Sequence[tuple[str, Lookahead, float]] = (
    ("0", 0, 1.0),
    ("1", 1, 1.0),
    ("2", 2, 1.0),
    ("to go, 0.9", "return_to_go", 0.9),
    ("to go", "return_to_go", 1.0),
)


def relative_bias(expected: FloatArray, true: FloatArray) -> float:
    """Distance of the expected estimate from the true gradient, in lengths of the latter."""
    return float(np.linalg.norm(expected - true) / np.linalg.norm(true))


def cosine(expected: FloatArray, true: FloatArray) -> float:
    """1: the same direction; below 0: the estimate raises the KL."""
    return float(expected @ true / np.linalg.norm(expected) / np.linalg.norm(true))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bias_table() -> str:
    """Relative bias of every rule and lookahead on random students and teachers."""
    rows = []
    for rule in get_args(CreditRule):
        for label, lookahead, discount in HORIZONS:
            weigh = weigher(rule, lookahead, discount=discount)
            rows.append([f"`{rule}`", label, *(f"{b:.3f}" for b in _mean_biases(weigh))])
    header = ["rule", "lookahead", *STUDY, "two spellings, path KL"]
    return table(header, rows)


@cache
def _study_case(name: str, seed: int, of: str) -> tuple[Case, FloatArray, FloatArray]:
    case, logits = STUDY[name](seed)
    return case, logits, kl_gradient(case, logits, of=of)


def _mean_biases(weigh: Weigh) -> list[float]:
    targets = [(name, "text") for name in STUDY] + [("two spellings", "episode")]
    means = []
    for name, of in targets:
        biases = []
        for seed in SEEDS:
            case, logits, true = _study_case(name, seed, of)
            expected = expected_gradient(case, logits, estimator_weights(case, logits, weigh))
            biases.append(relative_bias(expected, true))
        means.append(float(np.mean(biases)))
    return means


def warm_table() -> str:
    """Bias, noise and the fate of the wrong tag for a warm student, by lookahead, clip and stop."""
    settings: list[tuple[str, str, str, Weigh]] = [
        (
            label,
            clip_label,
            stop_label,
            weigher("unit", lookahead, clip=clip, stop_after=stop, discount=discount),
        )
        for label, lookahead, discount in HORIZONS
        for clip_label, clip in (("none", None), ("3", 3.0))
        for stop_label, stop in (("none", None), ("3", 3.0))
        if (clip is None) <= (stop is None)
    ]
    rows = [["true gradient", "", "", "0.000", "1.000", "", f"{_true_growth():+.2f}"]]
    for label, clip_label, stop_label, weigh in settings:
        rows.append([label, clip_label, stop_label, *_warm_row(weigh)])
    header = ["lookahead", "clip", "stop", "bias", "cosine", "noise", "growth of P(wrong)"]
    return table(header, rows)


def _true_growth() -> float:
    cases = [warm_case(seed) for seed in SEEDS]
    return float(np.mean([growth(c, x, b"<f", kl_gradient(c, x)) for c, x in cases]))


def _warm_row(weigh: Weigh) -> list[str]:
    measured = []
    for seed in SEEDS:
        case, logits = warm_case(seed)
        true = kl_gradient(case, logits)
        weights = estimator_weights(case, logits, weigh)
        expected = expected_gradient(case, logits, weights)
        scale = float(np.linalg.norm(true))
        measured.append(
            (
                relative_bias(expected, true),
                cosine(expected, true),
                noise(case, logits, weights) / scale,
                growth(case, logits, b"<f", expected),
            )
        )
    bias, direction, spread, rate = np.mean(measured, axis=0)
    return [f"{bias:.3f}", f"{direction:.3f}", f"{spread:.1f}", f"{rate:+.2f}"]


def flow_table() -> str:
    """Probability of the wrong text while the expected update of the prefix model is followed."""
    settings: list[tuple[str, Weigh]] = [
        ("lookahead 0, clip 3", weigher("unit", 0, clip=3.0)),
        ("lookahead 0, clip 1", weigher("unit", 0, clip=1.0)),
        ("lookahead 0, no clip", weigher("unit", 0)),
        ("lookahead 0, clip 3, stop 3", weigher("unit", 0, clip=3.0, stop_after=3.0)),
        ("lookahead 1, clip 3", weigher("unit", 1, clip=3.0)),
        ("lookahead 1, clip 3, stop 3", weigher("unit", 1, clip=3.0, stop_after=3.0)),
    ]
    rows = []
    for label, weigh in settings:
        case, logits = prefix_model()
        path = flow(case, logits, weigh, rate=0.25, steps=200, watch=b"<f")
        chosen = (path[0], path[20], max(path), path[200])
        rows.append([label, *(f"{p:.3f}" for p in chosen)])
    return table(["setting (`unit`)", "start", "t = 5", "highest", "t = 50"], rows)


def baseline_table(batch_size: int = 16, num_batches: int = 300) -> str:
    """Variance of a batch's gradient with the leave-one-out baseline, over that without."""
    makers = {"fixed units": STUDY["fixed units"], "prefix": STUDY["prefix"], "warm": warm_case}
    rows = []
    for label, lookahead, discount in HORIZONS:
        weigh = weigher("unit", lookahead, clip=3.0, discount=discount)
        cells = []
        for make in makers.values():
            found = [_variance_ratio(*make(s), weigh, batch_size, num_batches) for s in SEEDS]
            cells.append(f"{np.mean(found):.2f}")
        rows.append([label, *cells])
    return table(["lookahead (`unit`, clip 3)", *makers], rows)


def _variance_ratio(
    case: Case, logits: FloatArray, weigh: Weigh, batch_size: int, num_batches: int
) -> float:
    weights = estimator_weights(case, logits, weigh)
    plain = episode_gradients(case, logits, weights)
    scores = episode_gradients(case, logits, [np.ones(w.size) for w in weights])
    probs = np.exp(case.episode_logprobs(logits))
    rng = np.random.default_rng(0)
    without, removed = [], []
    for drawn in rng.choice(probs.size, size=(num_batches, batch_size), p=probs / probs.sum()):
        sizes = [weights[episode].size for episode in drawn]
        values = np.concatenate([weights[episode] for episode in drawn])
        ids = np.repeat(np.arange(batch_size), sizes)
        baseline = leave_one_out(values, np.ones(values.size, dtype=np.bool_), ids)
        own = baseline[np.cumsum(sizes) - 1]
        without.append(plain[drawn].mean(axis=0))
        removed.append((own[:, None] * scores[drawn]).mean(axis=0))
    raw, shift = np.array(without), np.array(removed)
    return float((raw - shift).var(axis=0).sum() / raw.var(axis=0).sum())


def reference_kl_table() -> str:
    """Expected gradients of the estimators of KL(policy, reference), exact for one softmax."""
    biases: dict[str, list[tuple[float, float]]] = {}
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        logits, reference = rng.normal(size=(2, 6))
        policy = np.exp(logits) / np.exp(logits).sum()
        ratio = np.exp(reference) / np.exp(reference).sum() / policy
        scores = np.eye(6) - policy
        k1, k3 = -np.log(ratio), ratio - 1 - np.log(ratio)
        true = (policy * k1) @ scores
        weights = {
            "k1 in the reward": k1,
            "k1 as a loss": np.ones(6),
            "k3 as a loss": 1 - ratio,
            "k3 as a loss, importance-weighted": k3 + 1 - ratio,
        }
        for name, weight in weights.items():
            expected = (policy * weight) @ scores
            biases.setdefault(name, []).append(
                (relative_bias(expected, true), float(np.linalg.norm(expected)))
            )
    rows = [[name, *(f"{x:.3f}" for x in np.mean(found, axis=0))] for name, found in biases.items()]
    return table(["estimator", "relative bias", "length of the expected gradient"], rows)


def study() -> str:
    """All tables, as they stand in docs/math.md between the markers."""
    mean = f"mean over {len(SEEDS)} random students and teachers"
    parts = {
        f"A. Relative bias, no clip, no stop ({mean})": bias_table(),
        f"B. A warm student with a prefix error in longer texts, `unit` ({mean})": warm_table(),
        "C. Probability of the wrong text in the prefix model": flow_table(),
        "D. Variance with the leave-one-out baseline, over variance without": baseline_table(),
        f"E. Estimators of the reference KL ({mean})": reference_kl_table(),
    }
    return "\n\n".join(f"**{title}**\n\n{text}" for title, text in parts.items())


def main() -> None:
    """Print the tables, or write them into the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/math.md")
    tables = study()
    if not parser.parse_args().write:
        print(tables)
        return
    text = DOC.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    DOC.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
