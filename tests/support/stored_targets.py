"""Small top-k targets and caches of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from miniverl_dist.lab.teacher_cache import CacheIdentity, TeacherCache, content_key
from miniverl_dist.schemas.targets import NO_TOKEN, TopKTargets, TrajectoryTargets

KEY = content_key([1, 2, 3], [9, 8], "all_model_tokens")


def identity(**changes: object) -> CacheIdentity:
    fields: dict[str, object] = {
        "teacher": "toy",
        "teacher_checksum": "a" * 64,
        "student_fingerprint": "b" * 64,
        "teacher_fingerprint": "c" * 64,
        "mode": "standard",
        "rendering": "native",
        "top_k": 5,
        "temperature": 1.0,
        "selection": "all_model_tokens",
    }
    return CacheIdentity.model_validate(fields | changes)


def targets(
    trajectory_id: str, *, version: int = 0, rows: int = 4, width: int = 5, seed: int = 0
) -> TrajectoryTargets:
    """Rows with rising numbers of kept tokens, the last ones of a row missing."""
    rng = np.random.default_rng([seed, *trajectory_id.encode()])
    full = np.log(rng.dirichlet(np.ones(width + 3), size=rows)) if rows else np.empty((0, width))
    kept = full[:, :width].copy()
    ids = np.stack([rng.permutation(1000)[:width] for _ in range(rows)]) if rows else kept
    for row in range(rows):
        missing = max(width - 1 - row, 0)
        kept[row, width - missing :], ids[row, width - missing :] = -np.inf, NO_TOKEN
    tails = np.log1p(-np.exp(kept).sum(axis=1))
    return TrajectoryTargets(
        trajectory_id,
        version,
        np.cumsum(rng.integers(1, 5, rows)),
        2 * rows + 1,
        TopKTargets(ids.astype(np.int64), kept, tails, rng.gamma(2.0, size=rows)),
    )


def arrays(found: TrajectoryTargets | None) -> dict[str, bytes]:
    """Everything in targets, bit by bit."""
    assert found is not None
    assert found.top_k is not None
    rows = found.top_k
    named = {
        "positions": found.positions,
        "token_ids": rows.token_ids,
        "logprobs": rows.logprobs,
        "tail_logprobs": rows.tail_logprobs,
        "entropies": rows.entropies,
    }
    head = f"{found.trajectory_id} {found.policy_version} {found.num_candidates}".encode()
    return {
        name: f"{array.dtype}{array.shape}".encode() + array.tobytes()
        for name, array in named.items()
    } | {"head": head}


def filled(folder: Path, *, num_versions: int = 3, per_version: int = 2) -> TeacherCache:
    """One shard per version."""
    cache = TeacherCache.open(folder, identity(), create=True)
    for version in range(num_versions):
        for member in range(per_version):
            cache.put(targets(f"ep-{version}.{member}", version=version, rows=2 + member), KEY)
        cache.flush()
    return cache
