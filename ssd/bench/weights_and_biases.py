"""A report as a run of Weights & Biases; offline with WANDB_MODE=offline."""

from __future__ import annotations

import importlib.util

from ssd.bench.measure import MEAN
from ssd.bench.report import Report
from ssd.errors import ConfigError, install_extra


def check_installed() -> None:
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"wandb is not installed: {install_extra('wandb')}, or leave --wandb out")


def log(report: Report, group: str | None, name: str | None) -> None:
    """Every number of every contender and set, as `contender/set/figure`; those of the mean as `contender/figure`."""
    import wandb

    run = wandb.init(project="ssd", group=group, name=name, config=report.header)
    figures: dict[str, float] = {}
    for row in report.rows:
        prefix = row["contender"] if row["set"] == MEAN else f"{row['contender']}/{row['set']}"
        figures |= {f"{prefix}/{key}": value for key, value in row.items() if isinstance(value, (int, float))}
    run.log(figures)
    run.finish()
