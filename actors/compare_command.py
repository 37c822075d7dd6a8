"""`miniverl-dist compare-evals`: two evaluations beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def compare_evals(
    a: Annotated[Path, typer.Argument(metavar="A", help="Run directory or eval.json.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other; shown is B minus A.")],
    row_a: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY:WHEN[:T]", help="Row of A, for instance student:warm; else all."
        ),
    ] = None,
    row_b: Annotated[
        str | None, typer.Option(metavar="POLICY:WHEN[:T]", help="Row of B; default as --row-a.")
    ] = None,
    intersection: Annotated[
        bool, typer.Option("--intersection", help="Compare only the tasks and T that both have.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Compare two evaluations, paired by task; refused unless they measured the same thing."""
    from actors.inspection import aligned
    from miniverl_dist.reporting.eval_compare import (
        RowChoice,
        compare,
        comparison_tables,
        read_side,
    )

    found = compare(
        read_side(a),
        read_side(b),
        row_a=None if row_a is None else RowChoice.parse(row_a),
        row_b=None if row_b is None else RowChoice.parse(row_b),
        intersection=intersection,
    )
    if as_json:
        typer.echo(json.dumps({"result": found.model_dump(mode="json")}))
        return
    typer.echo(f"A  {found.a}\nB  {found.b}")
    typer.echo(f"{found.environment}, temperature {found.temperature}, {found.scope}")
    for note in found.notes:
        typer.echo(f"note: {note}")
    for table in comparison_tables(found):
        shown = aligned([table.head, *table.rows]) if table.rows else []
        typer.echo("\n".join(["", table.title, *shown]))
