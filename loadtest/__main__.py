"""Load tests: `python -m loadtest COMMAND`. Each prints what it measured; none is part of the test suite."""

from __future__ import annotations

import click

from loadtest.engine import engine
from loadtest.schedule import schedule
from loadtest.smoke import smoke


@click.group(help=__doc__)
def main() -> None:
    """One module a command."""


main.add_command(engine)
main.add_command(schedule)
main.add_command(smoke)

if __name__ == "__main__":
    main(prog_name="python -m loadtest")
