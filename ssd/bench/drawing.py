"""Figures of matplotlib as PNG or SVG: checks before a measurement, and the same bytes for the same data."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

from ssd.errors import ConfigError, install_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_file(option: str, file: Path, kinds: Seq[str], plain: Seq[str] = (".json",)) -> None:
    """Checks file type, folder and matplotlib before anything is measured. `plain`: kinds without a drawing."""
    if file.suffix not in kinds:
        raise ConfigError(f"{option} {file}: the name must end in {', '.join(kinds)}")
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.parent}")
    if file.suffix not in plain and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{option} {file}: drawing needs matplotlib: {install_extra('plots')}")


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "ssd"  # else the ids in an SVG are random
    return Figure(figsize=(width, height), layout="constrained")


def encode(figure: Figure, kind: str, dpi: int = 150) -> bytes:
    """The figure as `png` or `svg`."""
    out = io.BytesIO()
    figure.savefig(out, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()
