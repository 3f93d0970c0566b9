"""Load tests: `python -m loadtest COMMAND`. Each prints what it measured; none is part of the test suite."""

from __future__ import annotations

import click

from loadtest.compression import compression
from loadtest.engine import engine
from loadtest.faults import faults
from loadtest.idle import idle
from loadtest.interference import interference
from loadtest.schedule import schedule
from loadtest.smoke import smoke
from loadtest.soak import soak
from loadtest.transfer import transfer


@click.group(help=__doc__)
def main() -> None:
    """One module a command."""


main.add_command(compression)
main.add_command(engine)
main.add_command(faults)
main.add_command(idle)
main.add_command(interference)
main.add_command(schedule)
main.add_command(smoke)
main.add_command(soak)
main.add_command(transfer)

if __name__ == "__main__":
    main(prog_name="python -m loadtest")
