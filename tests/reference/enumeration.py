"""Exact expectations of OPD gradient estimators for students small enough to list every episode.

The student is a table: one softmax over a few pieces of bytes after each path of pieces. The
teacher is exact at the byte level: a distribution over whole texts, from which the probability of
any next bytes follows; its tokens (greedy longest match) only decide where its logprobs are cut.
So the expected gradient of an estimator and the true gradient of the sequence KL are both finite
sums, and their difference is the estimator's bias, without sampling noise.

Shapes: P parameters (one logit per piece of each inner node), S student tokens of one path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.alignment.credit import CreditRule, Lookahead, opd_weights
from miniverl_dist.alignment.mau import Units, align

FloatArray = NDArray[np.float64]
Path = tuple[bytes, ...]
Weigh = Callable[[FloatArray, FloatArray, Units], FloatArray]
"""(student logprobs [S], teacher logprobs [R], units) -> weight of each student token [S]."""


@dataclass(frozen=True)
class Episode:
    """One complete path of the student."""

    pieces: Path
    slots: NDArray[np.int64]
    """[S] index of each token's logit."""

    @property
    def text(self) -> bytes:
        """Bytes of the whole episode."""
        return b"".join(self.pieces)

    @property
    def ends(self) -> list[int]:
        """[S] byte ends."""
        return list(accumulate(len(piece) for piece in self.pieces))


@dataclass(frozen=True)
class StudentTree:
    """Pieces allowed after each path; a path that is no key is a complete episode."""

    choices: Mapping[Path, Sequence[bytes]]

    @cached_property
    def node_of_slot(self) -> NDArray[np.int64]:
        """[P] which inner node each logit belongs to."""
        sizes = [len(pieces) for pieces in self.choices.values()]
        return np.repeat(np.arange(len(sizes)), sizes)

    @cached_property
    def episodes(self) -> tuple[Episode, ...]:
        """All complete paths."""
        starts: dict[Path, int] = {}
        for path, pieces in self.choices.items():
            starts[path] = sum(len(self.choices[other]) for other in starts)
            assert len(set(pieces)) == len(pieces)

        def walk(path: Path, slots: tuple[int, ...]) -> list[Episode]:
            if path not in self.choices:
                return [Episode(path, np.array(slots, dtype=np.int64))]
            return [
                episode
                for index, piece in enumerate(self.choices[path])
                for episode in walk((*path, piece), (*slots, starts[path] + index))
            ]

        return tuple(walk((), ()))

    @property
    def texts(self) -> tuple[bytes, ...]:
        """All different texts, in order."""
        return tuple(sorted({episode.text for episode in self.episodes}))

    def logprobs(self, logits: FloatArray) -> FloatArray:
        """[P] log-softmax within each node."""
        totals = np.bincount(self.node_of_slot, weights=np.exp(logits))
        return logits - np.log(totals)[self.node_of_slot]

    def scores(self, episode: Episode, logprobs: FloatArray) -> FloatArray:
        """[S, P] gradient of each token's logprob: one-hot minus the node's softmax."""
        node = self.node_of_slot
        same = node[episode.slots][:, None] == node[None, :]
        scores = np.where(same, -np.exp(logprobs), 0.0)
        scores[np.arange(episode.slots.size), episode.slots] += 1.0
        return scores


@dataclass(frozen=True)
class ByteTeacher:
    """Distribution over whole texts, none a prefix of another, cut into tokens of a vocabulary."""

    text_probs: Mapping[bytes, float]
    vocabulary: frozenset[bytes] = frozenset()
    """Pieces of more than one byte; every single byte is a token too."""

    def log_mass(self, prefix: bytes) -> float:
        """Log-probability that a text starts with ``prefix``."""
        return float(np.log(sum(p for x, p in self.text_probs.items() if x.startswith(prefix))))

    def ends(self, text: bytes) -> list[int]:
        """[R] byte ends of greedy longest-match tokens."""
        ends = []
        start = 0
        while start < len(text):
            fits = [len(t) for t in self.vocabulary if text.startswith(t, start)]
            start += max(fits, default=1)
            ends.append(start)
        return ends

    def logprobs(self, text: bytes) -> FloatArray:
        """[R] exact logprob of each token given the bytes before it."""
        mass = [self.log_mass(text[:end]) for end in [0, *self.ends(text)]]
        return np.diff(np.array(mass))


@dataclass(frozen=True)
class Case:
    """A student and a teacher whose estimators can be enumerated."""

    tree: StudentTree
    teacher: ByteTeacher

    @cached_property
    def scored(self) -> tuple[tuple[Episode, FloatArray, Units], ...]:
        """Each episode with the teacher's logprobs and the alignment."""
        return tuple(
            (e, self.teacher.logprobs(e.text), align(e.ends, self.teacher.ends(e.text)))
            for e in self.tree.episodes
        )

    def episode_logprobs(self, logits: FloatArray) -> FloatArray:
        """[E] log-probability of each episode."""
        logprobs = self.tree.logprobs(logits)
        return np.array([logprobs[e.slots].sum() for e in self.tree.episodes])

    def holds(self, part: bytes) -> NDArray[np.bool_]:
        """[E] whether each episode's text contains ``part``."""
        return np.array([part in episode.text for episode in self.tree.episodes])

    def probability(self, logits: FloatArray, part: bytes) -> float:
        """Probability that the student's text contains ``part``."""
        return float(np.exp(self.episode_logprobs(logits))[self.holds(part)].sum())


def weigher(
    rule: CreditRule,
    lookahead: Lookahead,
    *,
    clip: float | None = None,
    stop_after: float | None = None,
    discount: float = 1.0,
) -> Weigh:
    """The product's credit as an estimator."""

    def weigh(student: FloatArray, teacher: FloatArray, units: Units) -> FloatArray:
        weights, mask = opd_weights(
            student,
            teacher,
            units,
            rule=rule,
            clip=clip,
            lookahead=lookahead,
            stop_after=stop_after,
            discount=discount,
        )
        assert mask.all()
        return weights

    return weigh


def sequence_kl(case: Case, logits: FloatArray, *, of: str = "text") -> float:
    """KL from the student to the teacher in nats.

    ``of="text"``: between distributions over texts. ``of="episode"``: every spelling counts with
    its own probability; smaller by the entropy of the spelling given the text.
    """
    targets = _log_ratios(case, logits, of)
    return float(np.exp(case.episode_logprobs(logits)) @ targets)


def kl_gradient(case: Case, logits: FloatArray, *, of: str = "text") -> FloatArray:
    """[P] exact gradient of ``sequence_kl``: every token is credited with the whole log-ratio."""
    ratios = _log_ratios(case, logits, of)
    sizes = [episode.slots.size for episode in case.tree.episodes]
    weights = [np.full(size, ratio) for size, ratio in zip(sizes, ratios, strict=True)]
    return expected_gradient(case, logits, weights)


def growth(case: Case, logits: FloatArray, part: bytes, update: FloatArray) -> float:
    """Rate of change of the log-probability of ``part`` in a text under ``-update``."""
    inside = [np.full(e.slots.size, float(part in e.text)) for e in case.tree.episodes]
    gradient = expected_gradient(case, logits, inside)
    return float(-update @ gradient) / case.probability(logits, part)


def noise(case: Case, logits: FloatArray, weights: Sequence[FloatArray]) -> float:
    """Root of the summed variance of one episode's gradient sample."""
    probs = np.exp(case.episode_logprobs(logits))
    squares = (episode_gradients(case, logits, weights) ** 2).sum(axis=1)
    mean = expected_gradient(case, logits, weights)
    return float(np.sqrt(probs @ squares - mean @ mean))


def _log_ratios(case: Case, logits: FloatArray, of: str) -> FloatArray:
    own = case.episode_logprobs(logits)
    if of == "text":
        texts = [episode.text for episode in case.tree.episodes]
        index = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        group = np.array([index[text] for text in texts])
        own = np.log(np.bincount(group, weights=np.exp(own)))[group]
    ratios: FloatArray = own - np.array([teacher.sum() for _, teacher, _ in case.scored])
    return ratios


def estimator_weights(case: Case, logits: FloatArray, weigh: Weigh) -> list[FloatArray]:
    """Weights of every episode's tokens."""
    logprobs = case.tree.logprobs(logits)
    return [weigh(logprobs[e.slots], teacher, units) for e, teacher, units in case.scored]


def episode_gradients(case: Case, logits: FloatArray, weights: Sequence[FloatArray]) -> FloatArray:
    """[E, P] gradient sample that each episode gives: sum of weight times score over its tokens."""
    logprobs = case.tree.logprobs(logits)
    return np.array(
        [
            own @ case.tree.scores(episode, logprobs)
            for own, episode in zip(weights, case.tree.episodes, strict=True)
        ]
    )


def expected_gradient(case: Case, logits: FloatArray, weights: Sequence[FloatArray]) -> FloatArray:
    """[P] expectation of the gradient sample over all episodes."""
    probs = np.exp(case.episode_logprobs(logits))
    gradient: FloatArray = probs @ episode_gradients(case, logits, weights)
    return gradient


def flow(
    case: Case, logits: FloatArray, weigh: Weigh, *, rate: float, steps: int, watch: bytes
) -> list[float]:
    """Follow the expected update; the probability of ``watch`` before each step and at the end."""
    watched = []
    for _ in range(steps):
        watched.append(case.probability(logits, watch))
        weights = estimator_weights(case, logits, weigh)
        logits = logits - rate * expected_gradient(case, logits, weights)
    return [*watched, case.probability(logits, watch)]


def steps_of(num_steps: int, pieces: Sequence[bytes]) -> StudentTree:
    """A student that writes ``num_steps`` pieces, any of ``pieces`` each time."""
    choices: dict[Path, Sequence[bytes]] = {}
    paths: list[Path] = [()]
    for _ in range(num_steps):
        choices.update(dict.fromkeys(paths, pieces))
        paths = [(*path, piece) for path in paths for piece in pieces]
    return StudentTree(choices)


def tagged_tree(after_short: Sequence[bytes], num_last: int = 1) -> StudentTree:
    """A letter, then ``<t`` as one piece or ``<`` and more, then ``num_last`` letters."""
    choices: dict[Path, Sequence[bytes]] = {(): (b"a", b"b")}
    for first in (b"a", b"b"):
        choices[(first,)] = (b"<t", b"<")
        choices[(first, b"<")] = after_short
        paths: list[Path] = [(first, b"<t"), *((first, b"<", piece) for piece in after_short)]
        for _ in range(num_last):
            choices.update(dict.fromkeys(paths, (b"x", b"y")))
            paths = [(*path, last) for path in paths for last in (b"x", b"y")]
    return StudentTree(choices)


def random_case(
    tree: StudentTree, seed: int, vocabulary: frozenset[bytes] = frozenset()
) -> tuple[Case, FloatArray]:
    """Normal logits for the student, and a teacher whose text log-weights are normal too."""
    rng = np.random.default_rng(seed)
    weights = np.exp(rng.normal(size=len(tree.texts)))
    probs = dict(zip(tree.texts, (weights / weights.sum()).tolist(), strict=True))
    logits = rng.normal(size=tree.node_of_slot.size)
    return Case(tree, ByteTeacher(probs, vocabulary)), logits


def prefix_model() -> tuple[Case, FloatArray]:
    """A warm student that writes ``<f`` in 5 % of episodes where the teacher wants ``<t``.

    ``<t`` is one piece of the student and two of the teacher's, so its wrong short piece ``<`` is a
    prefix of what the teacher wants.
    """
    tree = StudentTree({(): (b"<t", b"<"), (b"<",): (b"t", b"f")})
    teacher = ByteTeacher({b"<t": 0.99, b"<f": 0.01})
    return Case(tree, teacher), np.log(np.array([0.95, 0.05, 0.01, 0.99]))


def warm_case(seed: int) -> tuple[Case, FloatArray]:
    """The prefix model inside longer texts: a letter before the tag, two letters after it."""
    rng = np.random.default_rng(seed)
    tree = tagged_tree((b"f", b"g"), num_last=2)
    student_tag = {(b"<t", b"<"): (0.95, 0.05), (b"f", b"g"): (0.99, 0.01)}
    logits = [
        np.log(student_tag[pieces]) if pieces in student_tag else rng.normal(size=len(pieces))
        for pieces in map(tuple, tree.choices.values())
    ]
    teacher_tag = {b"t": 0.99, b"f": 0.0099, b"g": 0.0001}
    probs: dict[bytes, float] = {}
    for first, its_prob in zip((b"a", b"b"), rng.dirichlet((2.0, 2.0)), strict=True):
        for letter, tag_prob in teacher_tag.items():
            last = zip((b"xx", b"xy", b"yx", b"yy"), rng.dirichlet([2.0] * 4), strict=True)
            for end, end_prob in last:
                probs[first + b"<" + letter + end] = float(its_prob * tag_prob * end_prob)
    return Case(tree, ByteTeacher(probs, TAG_VOCABULARY)), np.concatenate(logits)


ONE_UNIT_VOCABULARY = frozenset({b"aa", b"ab", b"ba", b"bb"})
TAG_VOCABULARY = frozenset({b"fx", b"fy", b"gx", b"gy"})
"""After a wrong tag letter the teacher's token spans two of the student's, in every text."""
MERGING_VOCABULARY = frozenset({b"ab"})
"""Whether two letters are one unit depends on the second: units depend on the sample."""

STUDY: Mapping[str, Callable[[int], tuple[Case, FloatArray]]] = {
    "one unit": lambda seed: random_case(steps_of(2, (b"a", b"b")), seed, ONE_UNIT_VOCABULARY),
    "fixed units": lambda seed: random_case(steps_of(4, (b"a", b"b")), seed),
    "prefix": lambda seed: random_case(tagged_tree((b"f", b"g")), seed, TAG_VOCABULARY),
    "two spellings": lambda seed: random_case(tagged_tree((b"t", b"f")), seed),
    "merging teacher": lambda seed: random_case(
        steps_of(4, (b"a", b"b")), seed, MERGING_VOCABULARY
    ),
}
"""Cases of the bias study by name; each takes a seed."""
