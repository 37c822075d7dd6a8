"""The per-turn verdict against bfcl-eval's own checker on the same episodes.

bfcl-eval evaluates the calls as text and keeps instances in module globals; here, in a test, that
is what we want to compare with. Every episode gets a model name of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import pytest

from miniverl_dist.config.recipe import BfclCategory
from miniverl_dist.environments.players import as_parsed
from miniverl_dist.schemas.messages import ToolCall
from rollout_server.bfcl.environment import BfclEnvironment, BfclOptions
from rollout_server.bfcl.tasks import BfclTask

pytestmark = [
    pytest.mark.bfcl,
    pytest.mark.skipif(
        importlib.util.find_spec("bfcl_eval") is None,
        reason="bfcl-eval is not installed: scripts/install_bfcl.sh",
    ),
]
Turns = list[list[ToolCall]]
_EPISODES = itertools.count()


CATEGORIES: tuple[BfclCategory, ...] = ("base", "long_context", "miss_func", "miss_param")


@pytest.fixture(scope="module", params=CATEGORIES)
def env(request: pytest.FixtureRequest) -> BfclEnvironment:
    return BfclEnvironment(BfclOptions(categories=(request.param,)))


@contextmanager
def long_data_restored() -> Iterator[None]:
    """bfcl-eval's own instances write into data that all later episodes share; put it back."""
    source = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code.long_context"
    data = {n: v for n, v in vars(importlib.import_module(source)).items() if isinstance(v, dict)}
    before = {name: deepcopy(value) for name, value in data.items() if name.isupper()}
    try:
        yield
    finally:
        for name, value in before.items():
            data[name].clear()
            data[name].update(value)


def as_text(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def upstream_verdict(task: BfclTask, turns: Turns) -> bool:
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    name = f"episode{next(_EPISODES)}"
    try:
        with long_data_restored():
            result = multi_turn_checker(
                [[[as_text(call)] for call in calls] for calls in turns],
                [[as_text(call) for call in calls] for calls in task.expert_turns],
                {
                    "id": task.task_id,
                    "initial_config": task.initial_config,
                    "involved_classes": list(task.classes),
                },
                f"multi_turn_{task.category}",
                name,
            )
    finally:
        for key in [key for key in vars(multi_turn_utils) if key.startswith(name)]:
            del vars(multi_turn_utils)[key]
    return bool(result["valid"])


def our_verdict(env: BfclEnvironment, task: BfclTask, prefix_calls: int, turns: Turns) -> bool:
    """Play ``turns`` whose first ``prefix_calls`` calls are the expert's."""
    session = env.start(task.task_id, prefix_calls=prefix_calls)
    first_turn = task.first_turn(prefix_calls)
    own = turns[first_turn:]
    own[0] = own[0][prefix_calls - sum(len(calls) for calls in turns[:first_turn]) :]
    for number, calls in enumerate(own):
        if number:
            session.next_user_turn()
        for call in calls:
            session.step(as_parsed([call]))
    return bool(session.finish().verdict["official_per_turn"])


def disturbed(rng: random.Random, task: BfclTask, prefix_calls: int) -> Turns:
    """The expert's turns with one to three slips behind the prefix."""
    turns = [list(calls) for calls in task.expert_turns]
    position = 0
    free = []
    for turn, calls in enumerate(task.expert_turns):
        free += [(turn, i) for i in range(len(calls)) if position + i >= prefix_calls]
        position += len(calls)
    for turn, index in sorted(rng.sample(free, min(len(free), rng.randint(1, 3))), reverse=True):
        call = turns[turn][index]
        slip = rng.choice(["drop", "twice", "late", "swap", "value", "name", "argument", "keep"])
        if slip in ("drop", "late"):
            del turns[turn][index]
        if slip == "late":
            turns[rng.randrange(turn, len(turns))].append(call)
        elif slip == "twice":
            turns[turn].insert(index, call)
        elif slip == "swap":
            tail = turns[turn][index:]
            rng.shuffle(tail)
            turns[turn][index:] = tail
        elif slip == "value" and call.arguments:
            key = rng.choice(sorted(call.arguments))
            turns[turn][index] = ToolCall(name=call.name, arguments=call.arguments | {key: "x"})
        elif slip == "name":
            turns[turn][index] = ToolCall(name="nonsense", arguments=call.arguments)
        elif slip == "argument":
            turns[turn][index] = ToolCall(name=call.name, arguments=call.arguments | {"no": 1})
    return turns


def test_expert_nothing_and_put_off_agree(env: BfclEnvironment) -> None:
    for task in env.data.tasks.values():
        expert = [list(calls) for calls in task.expert_turns]
        nothing: Turns = [[] for _ in expert]
        put_off: Turns = [*nothing[:-1], list(task.expert_calls)]
        for turns in (expert, nothing, put_off):
            assert our_verdict(env, task, 0, turns) == upstream_verdict(task, turns), task.task_id


def test_disturbed_episodes_agree_at_random_horizons(env: BfclEnvironment) -> None:
    rng = random.Random(7)
    found: list[bool] = []
    for task in env.data.tasks.values():
        for _ in range(5 if task.category == "base" else 2):
            prefix_calls = rng.randrange(task.num_calls)
            turns = disturbed(rng, task, prefix_calls)
            ours = our_verdict(env, task, prefix_calls, turns)
            found.append(ours)
            assert ours == upstream_verdict(task, turns), (task.task_id, prefix_calls, turns)
    assert 0.2 < sum(found) / len(found) < 0.8  # both verdicts occur often
