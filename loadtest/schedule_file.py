"""What `loadtest schedule --json` says, and how it is read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from loadtest.schedule_costs import Cost
from loadtest.schedule_report import rows_of
from loadtest.schedule_runs import Cell, Run

_CELL = tuple(each.name for each in fields(Cell))


def written(runs: Sequence[Run], costs: Sequence[Cost]) -> str:
    """One line: `rows`, sums over seeds; `runs`, one by one; `costs` of decisions."""
    rows = [row.as_dict() for row in rows_of(runs)]
    each = [{**asdict(run.cell), "seed": run.seed, **run.values} for run in runs]
    return json.dumps({"rows": rows, "runs": each, "costs": [asdict(cost) for cost in costs]})


def read(path: Path) -> tuple[list[Run], list[Cost]]:
    """The runs and costs of such a file. ValueError: it is none."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return [_run(dict(one)) for one in said["runs"]], [Cost(**one) for one in said["costs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not what `loadtest schedule --json` writes: {error!r}") from None


def _run(values: dict[str, object]) -> Run:
    cell = {name: values.pop(name) for name in _CELL}
    seed = values.pop("seed")
    return Run(cell=Cell(**cell), seed=int(str(seed)), values={name: float(str(one)) for name, one in values.items()})  # type: ignore[arg-type]  # of JSON
