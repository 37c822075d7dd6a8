"""A plan as tables for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from actors.memory_estimate import RankMemory, size_text
from actors.plan import Plan


def render(plan: Plan, width: int | None = None) -> str:
    """The whole plan as plain text; ``width`` None takes the terminal's, or 100 columns."""
    screen = Console()
    columns = width or (screen.width if screen.is_terminal else 100)
    console = Console(file=io.StringIO(), width=columns, color_system=None)
    console.print(Group(*_parts(plan)))
    file = console.file
    return file.getvalue() if isinstance(file, io.StringIO) else ""


def _parts(plan: Plan) -> Iterator[RenderableType]:
    yield Text(f"{plan.name}: runtime {plan.runtime}")
    if plan.num_parameters is not None and plan.num_active_parameters is not None:
        yield Text(
            f"student: {_count(plan.num_parameters)} parameters, "
            f"{_count(plan.num_active_parameters)} of them active for a token"
        )
    if plan.placement.groups:
        yield _placement(plan)
    if plan.fit is not None:
        yield Text(plan.fit.table())
    if plan.ranks:
        yield _ranks(plan)
        yield _memory(plan)
    yield from _engine(plan)
    if plan.publish is not None:
        sent = plan.publish
        yield Text(
            f"publish ({sent.transport}): {size_text(sent.total_bytes)} in {sent.num_buckets} "
            f"bucket(s) to {sent.num_engines} engine(s), {sent.how}; "
            f"at most {size_text(sent.moved_bytes)} over all links"
            + (f"; {sent.into_servers}" if sent.into_servers else "")
        )
    yield _phases(plan)
    for note in plan.notes:
        yield Text(f"note: {note}")
    if plan.ranks:
        yield Text("bytes are estimates; formulas: docs/cluster.md")


def _table(title: str, *columns: str) -> Table:
    """Columns whose names end in a space are aligned to the right."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.strip(), justify="right" if column.endswith(" ") else "left")
    return table


def _placement(plan: Plan) -> Table:
    total = plan.placement.total
    table = _table(
        f"placement: {total} in all", "role", "bundles ", "actors each ", "bundle", "how"
    )
    for group in plan.placement.groups:
        how = "a node each" if group.is_spread else "wherever they fit"
        counts = str(group.num_bundles), str(group.actors_per_bundle)
        table.add_row(group.role, *counts, str(group.bundle), how)
    return table


def _ranks(plan: Plan) -> Table:
    names = ("node", "local", "tp", "cp", "dp", "pp", "etp", "ep", "expert dp")
    table = _table("ranks (experts: etp, ep, expert dp)", "rank ", *(f"{name} " for name in names))
    for place in plan.ranks:
        dense = (place.node, place.local_rank, place.tp, place.cp, place.dp, place.pp)
        cells = (place.rank, *dense, place.etp, place.ep, place.expert_dp)
        table.add_row(*map(str, cells))
    return table


def _memory(plan: Plan) -> Table:
    limit = "" if plan.usable_bytes is None else f", at most {size_text(plan.usable_bytes)} usable"
    names = ("dense", "expert", "weights", "gradients", "optimizer", "activations", "logits", "sum")
    table = _table(f"memory of a rank{limit}", "ranks", *(f"{n} " for n in names), "host ")
    for label, memory in _alike(plan.memory):
        sizes = (
            memory.weights_bytes,
            memory.gradient_bytes,
            memory.optimizer_bytes,
            memory.activation_bytes,
            memory.logits_bytes,
            memory.device_bytes,
            memory.host_bytes,
        )
        counts = _count(memory.parameters.dense), _count(memory.parameters.expert)
        table.add_row(label, *counts, *map(size_text, sizes))
    return table


def _alike(memory: Sequence[RankMemory]) -> Iterator[tuple[str, RankMemory]]:
    """Neighbouring ranks with equal figures as one row."""
    start = 0
    for end in range(1, len(memory) + 1):
        if end == len(memory) or _figures(memory[end]) != _figures(memory[start]):
            yield f"{start}-{end - 1}" if end - 1 > start else str(start), memory[start]
            start = end


def _figures(memory: RankMemory) -> tuple[int, ...]:
    parameters = memory.parameters
    return (parameters.dense, parameters.expert, memory.device_bytes, memory.host_bytes)


def _engine(plan: Plan) -> Iterator[RenderableType]:
    if plan.engine is None:
        return
    engine = plan.engine
    device = "GPU" if engine.kind == "sglang" else "process"
    yield Text(
        f"engines: {engine.num_engines} x {engine.kind} on {engine.num_devices} device(s); a "
        f"{device} holds {size_text(engine.weights_bytes)} of weights, a request of "
        f"{engine.context_tokens} tokens takes {size_text(engine.request_bytes)} of cache, "
        f"up to {engine.requests} at once"
    )


def _phases(plan: Plan) -> Table:
    table = _table("phases of a step", "phase", "where", "tokens, at most ", "what")
    for phase in plan.phases:
        tokens = "" if phase.max_tokens is None else f"{phase.max_tokens:,}"
        table.add_row(phase.name, phase.where, tokens, phase.what)
    return table


def _count(value: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(value)
