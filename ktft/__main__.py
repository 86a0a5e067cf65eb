"""`python -m ktft` is the `ktft` command."""

from ktft.cli.main import app

app()
