"""`python -m ssd` is the `ssd` command."""

from ssd.cli.main import app

app(prog_name="ssd")
