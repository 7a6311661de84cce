"""Comparison as one self-contained page: tables, interactive curves, and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from keel.compare import tables
from keel.compare.align import grid_to
from keel.compare.comparison import Comparison, Pair
from keel.compare.picture import VERDICTS, band, color_of, profile_levels
from keel.compare.tables import Table, signed
from keel.compare.verdict import percent
from keel.functional import performance_profile
from keel.templates import Markup, Templates, join, style
from keel.tracking.files import write_file

Sections = Sequence[tuple[str, Table]]
"""Titles and tables."""

HTML = Templates(__package__, "comparison.html")


def write_page(comparison: Comparison, path: Path, sections: Sections = ()) -> None:
    """Write the page of a comparison to `path`, with further `sections`."""
    write_file(path, page(comparison, sections).encode(errors="replace"))


def page(comparison: Comparison, sections: Sections = ()) -> str:
    """Return the page as HTML; everything that comes from outside is escaped."""
    first, *variants = (group.name for group in comparison.groups)
    changes = (_changes(pair) for pair in comparison.pairs)
    return HTML.fill(
        "page",
        names=f"{', '.join(variants)} against {first}" if variants else first,
        style=style(__package__, "comparison.css"),
        title=tables.title(comparison),
        cards=join(map(_card, comparison.pairs)),
        sections=_lines(_section(title, _table(table)) for title, table in sections),
        scores=_table(tables.scores(comparison)),
        figures=_lines(
            _figures(comparison, task, first=i == 0) for i, task in enumerate(comparison.tasks)
        ),
        costs=_table(tables.costs(comparison)),
        changes=_lines(changes),
        notes=join(
            HTML.fill("note", text=note) for note in (*comparison.notes, _rules(comparison))
        ),
    )


def _lines(parts: Iterable[Markup]) -> Markup:
    return join(Markup(f"{part}\n") for part in parts)


def _section(title: str, content: Markup) -> Markup:
    return HTML.fill("section", title=title, content=content)


def _card(pair: Pair) -> Markup:
    return HTML.fill(
        "card",
        color=VERDICTS[pair.verdict.decision],
        variant=pair.variant,
        baseline=pair.baseline,
        decision=pair.verdict.decision,
        effect=signed(pair.effect.estimate),
        reasons=join(pair.verdict.reasons, "<br>"),
        better=percent(float(pair.better.estimate)),
    )


def _table(table: Table) -> Markup:
    return HTML.fill(
        "table",
        head=join(HTML.fill("head", text=x) for x in table.columns),
        rows=join(
            HTML.fill("row", cells=join(HTML.fill("cell", text=cell) for cell in row))
            for row in table.rows
        ),
    )


def _changes(pair: Pair) -> Markup:
    if not pair.changes:
        return Markup()
    return _section(f"What differs: {pair.variant}", _table(tables.changes(pair)))


def _rules(comparison: Comparison) -> str:
    limits = comparison.criteria
    return (
        f"keep: the {limits.confidence:.0%} interval of the change lies above 0 (of several "
        "variants: and p after Holm's correction is small enough). Slightly worse: it lies below "
        f"0, and the drop is up to {limits.drop:.0%}. Roll back: the drop is over that, or numbers "
        f"became non-finite that were not before, or it is over {limits.slowdown:g}× slower. "
        "Otherwise the two are not distinguishable. Interval: Yuen and Welch's, of interquartile "
        "means."
    )


def _figures(comparison: Comparison, task: str, *, first: bool) -> Markup:
    """Draw curves and profile of a task; the plotting library is in the page once."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(
        cols=2, column_widths=[0.66, 0.34], subplot_titles=("learning", "performance profile")
    )
    grid = grid_to(comparison.horizon[task])
    levels = profile_levels(comparison, task)
    for group in comparison.groups:
        color, name = color_of(comparison, group), escape(group.name)
        trace: dict[str, Any] = {"legendgroup": name, "name": name}
        low, middle, high = band(group.curves[task])
        edge: dict[str, Any] = {
            "mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip",
            "legendgroup": name,
        }  # fmt: skip
        faint = {"fill": "tonexty", "fillcolor": _faint(color)}
        line = {"color": color, "width": 2}
        figure.add_trace(go.Scatter(x=grid, y=high, **edge))
        figure.add_trace(go.Scatter(x=grid, y=low, **edge, **faint))
        figure.add_trace(go.Scatter(x=grid, y=middle, line=line, **trace))
        share = performance_profile(group.scores[task][:, None], levels).numpy()
        trace |= {"line": {**line, "shape": "hv"}, "showlegend": False}
        figure.add_trace(go.Scatter(x=levels.numpy(), y=share, **trace), col=2, row=1)
    figure.add_hline(comparison.thresholds[task], line_dash="dash", line_color="#868e96", col=1)
    figure.update_layout(
        template="simple_white", height=420, margin={"l": 60, "r": 20, "t": 40, "b": 50},
        hovermode="x unified", legend={"orientation": "h", "y": -0.22},
    )  # fmt: skip
    figure.update_xaxes(title="environment steps", col=1)
    figure.update_yaxes(title=escape(comparison.curve_metric), col=1)
    figure.update_xaxes(title="score τ", col=2)
    figure.update_yaxes(title="share of runs above τ", range=[-0.02, 1.05], col=2)
    plot: str = figure.to_html(
        full_html=False,
        include_plotlyjs=first,
        div_id=f"task-{comparison.tasks.index(task)}",
        config={"responsive": True},
    )
    return _section(task or "curves", HTML.fill("figure", plot=Markup(plot)))


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
