"""How the report's figures look, and how one becomes SVG text that stands in a page.

Text stays text, and is never read as mathematics. A colour with a role is written as a CSS variable (`var(--ink)`), so
that the page's light and dark schemes hold for its figures, too.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

WIDTH_IN = 8.0
"""The page shows a figure at least as wide as paper does, so that its text has 11 pixels there."""

# Colours that nothing else has; the page says what they are.
INK, MUTED, GRID, SURFACE = "#010101", "#010102", "#010103", "#010104"
RUN, OTHER, RECOVERY = "#010105", "#010106", "#010107"
_VARIABLES = {
    INK: "ink", MUTED: "muted", GRID: "grid", SURFACE: "surface", RUN: "run", OTHER: "other", RECOVERY: "recovery",
}  # fmt: skip

_SIZE_PT = 9.0
_STYLE: Any = {
    "svg.fonttype": "none", "text.parse_math": False, "font.family": "DejaVu Sans", "font.size": _SIZE_PT,
    "axes.titlesize": _SIZE_PT, "axes.labelsize": _SIZE_PT, "legend.fontsize": _SIZE_PT,
    "xtick.labelsize": _SIZE_PT, "ytick.labelsize": _SIZE_PT, "axes.titlelocation": "left", "axes.titlepad": 15,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "figure.facecolor": "none", "axes.facecolor": "none",
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.xmargin": 0.0,
    "legend.frameon": False, "legend.borderaxespad": 0.0, "lines.linewidth": 1.4,
}  # fmt: skip


@contextmanager
def drawing() -> Iterator[None]:
    """Figures made and saved inside look alike."""
    with rc_context(_STYLE), warnings.catch_warnings():
        # The reader's fonts show the text; the one here only measures it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        yield


def svg_of(figure: Figure, name: str, title: str) -> str:
    """The figure as an `<svg>` element. `name` keeps its ids apart from other figures'; `title` says what it shows."""
    out = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<g id=)"[^"]*"', "<g", text)  # named alike in every figure
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt" ', 'role="img" ', text, count=1)
    return re.sub("|".join(_VARIABLES), lambda found: f"var(--{_VARIABLES[found[0]]})", text)
