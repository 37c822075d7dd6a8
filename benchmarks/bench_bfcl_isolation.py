"""What it costs that no long-context episode can touch another: modules of its own, or a process.

    python -m benchmarks.bench_bfcl_isolation

Plays the expert's part of the same tasks in three ways, one after the other in each round:

* ``modules``: how it is done: every session runs the tools' modules anew, in this process;
* ``process``: a process per episode, forked from a server that has everything imported, and
  given no more than its task;
* ``shared``: no isolation at all: what is paid on top of it is the price of each way.

Exits with 1 unless modules cost less than processes.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from miniverl_dist.environments.players import play_expert
from rollout_server.bfcl import environment, package
from rollout_server.bfcl.environment import BfclEnvironment, BfclOptions
from rollout_server.bfcl.tasks import BfclData, BfclTask, load_data

TASK_IDS = tuple(f"multi_turn_long_context_{number}" for number in range(0, 200, 20))
NUM_ROUNDS = 3
Player = Callable[[str], bool]


def play(task_id: str) -> bool:
    env = BfclEnvironment(BfclOptions(categories=("long_context",)))  # the data is read once
    return play_expert(env.start(task_id, prefix_calls=0)).passed


def play_in_a_process(task_id: str) -> bool:
    data = load_data(categories=("long_context",))
    data = replace(data, tasks={task_id: data.task(task_id)})
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_report, args=(task_id, data))
    process.start()
    process.join(60)
    return process.exitcode == 0


def _report(task_id: str, data: BfclData) -> None:
    env = BfclEnvironment(data=data)
    sys.exit(0 if play_expert(env.start(task_id, prefix_calls=0)).passed else 1)


def _shared_classes(task: BfclTask) -> dict[str, type]:
    return {name: package.tool_class(name) for name in task.classes}


def play_shared(task_id: str) -> bool:
    own, environment.tool_classes = environment.tool_classes, _shared_classes
    try:
        return play(task_id)
    finally:
        environment.tool_classes = own


def milliseconds(player: Player) -> float:
    """Wall time of an episode, the mean over all tasks."""
    started = time.perf_counter()
    if not all(player(task_id) for task_id in TASK_IDS):
        raise SystemExit("an expert failed")
    return (time.perf_counter() - started) / len(TASK_IDS) * 1e3


def main() -> None:
    tools = {package.tool_class(name).__module__ for name in package.DOC_FILES}
    multiprocessing.set_forkserver_preload([environment.__name__, *sorted(tools)])
    players = {"shared": play_shared, "modules": play, "process": play_in_a_process}
    for player in players.values():
        milliseconds(player)
    rounds = [{name: milliseconds(p) for name, p in players.items()} for _ in range(NUM_ROUNDS)]
    cost = {name: statistics.median(r[name] for r in rounds) for name in players}
    for name, value in cost.items():
        print(f"{name:8} {value:8.2f} ms per episode, {value / cost['shared']:6.2f} x shared")
    extra = {name: cost[name] - cost["shared"] for name in ("modules", "process")}
    print(f"price of a process / price of modules: {extra['process'] / extra['modules']:.1f}")
    sys.exit(0 if extra["modules"] < extra["process"] else 1)


if __name__ == "__main__":
    main()
