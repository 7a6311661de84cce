"""Comparison as one self-contained page: tables, interactive curves, and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from keel.compare import tables
from keel.compare.align import grid_to
from keel.compare.comparison import Comparison, Pair
from keel.compare.picture import VERDICTS, band, color_of
from keel.compare.tables import Table, signed
from keel.compare.verdict import percent
from keel.functional import performance_profile
from keel.look import INK, PALE
from keel.tracking.files import write_file

Sections = Sequence[tuple[str, Table]]
"""Titles and tables."""

STYLE = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; color: {INK}; margin: 0 auto; max-width: 1120px;
  padding: 24px; }}
h1, .sub, .card, .notes {{ overflow-wrap: anywhere; }}
h1 {{ font-size: 24px; margin: 0 0 4px; }} h2 {{ font-size: 18px; margin: 32px 0 8px; }}
.sub {{ color: #52606d; margin: 0 0 20px; }}
.cards {{ display: flex; flex-wrap: wrap; gap: 14px; }}
.card {{ border: 1px solid {PALE}; border-left: 6px solid var(--c); border-radius: 6px;
  padding: 12px 16px; flex: 1 1 320px; }}
.card b {{ color: var(--c); font-size: 18px; }} .card p {{ margin: 4px 0 0; }}
.wide {{ overflow-x: auto; }} .figure {{ min-width: 680px; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 8px 0; }}
th, td {{ padding: 5px 14px 5px 0; text-align: right; border-bottom: 1px solid {PALE};
  white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; white-space: normal; min-width: 130px;
  overflow-wrap: anywhere; }} th {{ font-weight: 600; }}
.notes {{ color: #52606d; }}
"""


def write_page(comparison: Comparison, path: Path, sections: Sections = ()) -> None:
    """Write the page of a comparison to `path`, with further `sections`."""
    write_file(path, page(comparison, sections).encode(errors="replace"))


def page(comparison: Comparison, sections: Sections = ()) -> str:
    """Return the page as HTML; everything that comes from outside is escaped."""
    first, *variants = (escape(group.name) for group in comparison.groups)
    names = f"{', '.join(variants)} against {first}" if variants else first
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{names}</title><style>{STYLE}</style>",
        f"<h1>{names}</h1><p class=sub>{escape(tables.title(comparison))}</p>",
        f"<div class=cards>{''.join(map(_card, comparison.pairs))}</div>",
        *(f"<h2>{escape(title)}</h2>{_table(table)}" for title, table in sections),
        "<h2>What was earned</h2>",
        _table(tables.scores(comparison)),
        *(_figures(comparison, task, first=i == 0) for i, task in enumerate(comparison.tasks)),
        "<h2>What it cost</h2>",
        _table(tables.costs(comparison)),
        *map(_changes, comparison.pairs),
        _notes(comparison),
        "</html>",
    ]
    return "\n".join(parts)


def _card(pair: Pair) -> str:
    reasons = "<br>".join(map(escape, pair.verdict.reasons))
    return (
        f"<div class=card style='--c:{VERDICTS[pair.verdict.decision]}'>"
        f"{escape(pair.variant)} against {escape(pair.baseline)}<br>"
        f"<b>{pair.verdict.decision}</b> · {escape(signed(pair.effect.estimate))}"
        f"<p>{reasons}</p>"
        f"<p>better in {percent(float(pair.better.estimate))} of pairs of runs</p></div>"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(x)}</th>" for x in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    return f"<div class=wide><table><tr>{head}</tr>{rows}</table></div>"


def _changes(pair: Pair) -> str:
    if not pair.changes:
        return ""
    heading = f"<h2>What differs: {escape(pair.variant)}</h2>"
    return heading + _table(tables.changes(pair))


def _notes(comparison: Comparison) -> str:
    limits = comparison.criteria
    rules = (
        f"keep: the {limits.confidence:.0%} interval of the change lies above 0 (of several "
        "variants: and p after Holm's correction is small enough). Slightly worse: it lies below "
        f"0, and the drop is up to {limits.drop:.0%}. Roll back: the drop is over that, or numbers "
        f"became non-finite that were not before, or it is over {limits.slowdown:g}× slower. "
        "Otherwise the two are not distinguishable. Interval: Yuen and Welch's, of interquartile "
        "means."
    )
    lines = "".join(f"<li>{escape(note)}</li>" for note in (*comparison.notes, rules))
    return f"<h2>How to read it</h2><ul class=notes>{lines}</ul>"


def _figures(comparison: Comparison, task: str, *, first: bool) -> str:
    """Draw curves and profile of a task; the plotting library is in the page once."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(
        cols=2, column_widths=[0.66, 0.34], subplot_titles=("learning", "performance profile")
    )
    grid = grid_to(comparison.horizon[task])
    scores = torch.cat([group.scores[task] for group in comparison.groups])
    margin = 0.05 * float(scores.max() - scores.min()) or 1.0
    levels = torch.linspace(
        float(scores.min()) - margin, float(scores.max()) + margin, 200, dtype=torch.float64
    )
    for group in comparison.groups:
        color, name = color_of(comparison, group), escape(group.name)
        trace: dict[str, Any] = {"legendgroup": name, "name": name}
        low, middle, high = band(group.curves[task])
        edge = {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
        figure.add_trace(go.Scatter(x=grid, y=high, **edge, legendgroup=name))
        figure.add_trace(
            go.Scatter(
                x=grid, y=low, **edge, legendgroup=name, fill="tonexty", fillcolor=_faint(color)
            )
        )
        figure.add_trace(go.Scatter(x=grid, y=middle, line={"color": color, "width": 2}, **trace))
        share = performance_profile(group.scores[task][:, None], levels)
        line = {"color": color, "width": 2, "shape": "hv"}
        profile = go.Scatter(
            x=levels.numpy(), y=share.numpy(), line=line, showlegend=False, **trace
        )
        figure.add_trace(profile, col=2, row=1)
    figure.add_hline(comparison.thresholds[task], line_dash="dash", line_color="#868e96", col=1)
    figure.update_layout(
        template="simple_white", height=420, margin={"l": 60, "r": 20, "t": 40, "b": 50},
        hovermode="x unified", legend={"orientation": "h", "y": -0.22},
    )  # fmt: skip
    figure.update_xaxes(title="environment steps", col=1)
    figure.update_yaxes(title=escape(comparison.curve_metric), col=1)
    figure.update_xaxes(title="score τ", col=2)
    figure.update_yaxes(title="share of runs above τ", range=[-0.02, 1.05], col=2)
    heading = f"<h2>{escape(task or 'curves')}</h2>"
    plot: str = figure.to_html(
        full_html=False,
        include_plotlyjs=first,
        div_id=f"task-{comparison.tasks.index(task)}",
        config={"responsive": True},
    )
    return f"{heading}<div class=wide><div class=figure>{plot}</div></div>"


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
