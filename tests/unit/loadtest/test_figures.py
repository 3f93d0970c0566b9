from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loadtest import interference_figure, schedule_figure
from loadtest.interference_report import Answer, Observed
from loadtest.schedule_file import read, written
from loadtest.schedule_report import rows_of
from loadtest.schedule_runs import Cell, Run

VALUES = {"p95_jct_s": 1.0, "latency_per_token_s": 0.1}


def runs(*jct_s: tuple[str, float, float], workload: str = "skewed", mode: str = "decode-only") -> list[Run]:
    """A run for each (policy, load, mean completion)."""
    return [
        Run(
            cell=Cell(workload=workload, mode=mode, load=load, policy=policy),
            seed=0,
            values={"mean_jct_s": mean_s, **VALUES},
        )
        for policy, load, mean_s in jct_s
    ]


SKEWED = runs(("fcfs", 0.9, 2.0), ("fcfs", 1.0, 6.0), ("mlfq", 0.9, 1.0), ("mlfq", 1.0, 2.0))
EVEN = runs(("fcfs", 1.0, 4.0), ("mlfq", 1.0, 8.0), workload="even")


def test_each_kind_of_traffic_has_a_column_whose_curves_are_the_policies_by_load() -> None:
    panels = schedule_figure.over_load(rows_of([*EVEN, *SKEWED])).axes
    assert [axes.get_title() for axes in panels] == ["skewed, decode-only", "even, decode-only", "", ""]
    curves = {str(line.get_label()): line.get_xydata() for line in panels[0].lines}
    assert {name: points.tolist() for name, points in curves.items() if points is not None and len(points)} == {
        "fcfs": [[0.9, 2.0], [1.0, 6.0]],
        "mlfq": [[0.9, 1.0], [1.0, 2.0]],
    }


def test_gains_are_those_at_the_load_next_to_one_the_smallest_below() -> None:
    mean_jct, _ = schedule_figure.over_workloads(rows_of([*SKEWED, *EVEN])).axes
    assert [label.get_text() for label in mean_jct.get_yticklabels()] == ["even, decode-only", "skewed, decode-only"]
    gains = next(line for line in mean_jct.lines if line.get_label() == "mlfq")
    assert list(gains.get_xdata()) == [0.5, 3.0]


def test_a_curve_that_hardly_moves_does_not_fill_its_panel() -> None:
    low, high = schedule_figure.over_load(rows_of(runs(("fcfs", 0.9, 1.0), ("fcfs", 1.0, 1.01)))).axes[0].get_ylim()
    assert high / low == pytest.approx(schedule_figure.LEAST_SPAN)


def test_figures_are_written_as_png_and_svg_into_a_folder_that_is_made(tmp_path: Path) -> None:
    drawn = schedule_figure.draw(rows_of(SKEWED), tmp_path / "new")
    assert sorted(path.name for path in drawn) == [
        "schedule-load.png",
        "schedule-load.svg",
        "schedule-workloads.png",
        "schedule-workloads.svg",
    ]
    assert all(path.stat().st_size > 1000 for path in drawn)


def test_runs_without_a_row_to_draw_make_no_figure(tmp_path: Path) -> None:
    assert schedule_figure.draw([], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_says_is_read_again_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "said.json").write_text(written(SKEWED, []), encoding="utf-8")
    assert read(tmp_path / "said.json") == (SKEWED, [])


@pytest.mark.parametrize("said", ["", "{}", "[]", '{"runs": [{"seed": 1}], "costs": []}', '{"runs": [1], "costs": []}'])
def test_another_file_is_refused_by_its_name(tmp_path: Path, said: str) -> None:
    (tmp_path / "other.json").write_text(said, encoding="utf-8")
    with pytest.raises(ValueError, match=r"other\.json is not what"):
        read(tmp_path / "other.json")


def test_every_server_has_a_panel_of_its_gaps_and_a_curve_below() -> None:
    short = Answer(long=False, sent_s=0.0, arrivals_s=(1.0, 1.1, 12.0, 12.5), tokens=4)
    long = Answer(long=True, sent_s=11.0, arrivals_s=(12.0,), tokens=1)
    run = Observed(name="ours", loaded_s=10.0, end_s=20.0, answers=(short, long))
    peer = Observed(name="peer", loaded_s=10.0, end_s=20.0, answers=(replace(short, arrivals_s=(1.0, 1.1)),))
    quiet, ours, below = interference_figure.over_time([peer, run]).axes
    assert ours.get_ylim() == quiet.get_ylim() and ours.get_ylim()[1] > 500
    dots, *prompts = ours.lines
    assert [round(float(gap_ms)) for gap_ms in dots.get_ydata()] == [100, 500]
    assert [list(line.get_xdata()) for line in prompts] == [[11.0, 11.0]]
    assert len(quiet.lines) == 1
    legend = below.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["peer", "ours"]
