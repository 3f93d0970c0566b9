"""`diptych demo`: a mesh from nothing, one question, where the time went, and away with it."""

from __future__ import annotations

import sys

import click

from services.cli.calls import channel_to
from services.cli.generate import ask, build_request
from services.cli.launch import launched
from services.cli.phases import phase_table
from services.cli.tables import table_console
from services.errors import StartError

QUESTION = "What is the capital of France?"
ANSWER_LIMIT_S = 120.0


@click.command()
@click.option("--question", default=QUESTION, show_default=True)
@click.argument("up_arguments", nargs=-1)
def demo(question: str, up_arguments: tuple[str, ...]) -> None:
    """Starts a mesh, asks it one question over gRPC, shows where the time went, stops it.

    UP_ARGUMENTS after "--" are passed on to `diptych up`.
    """
    console = table_console(stderr=True)
    try:
        with launched(["--log-level=warning", *up_arguments], progress=_progress) as mesh:
            click.echo(f"mesh is ready: gRPC {mesh.grpc}, HTTP {mesh.http}", err=True)
            click.echo(f"> {question}")
            with channel_to(mesh.grpc) as channel:
                answer = ask(channel, build_request(question, max_tokens=64), limit_s=ANSWER_LIMIT_S, on_text=_echo)
            click.echo()
            console.print(phase_table(answer.usage, answer.phases))
        click.echo("stopped cleanly", err=True)
    except StartError as error:
        raise click.ClickException(str(error)) from None


def _progress(elapsed_s: float) -> None:
    if sys.stderr.isatty() or int(elapsed_s) % 5 == 0:
        end = "\r" if sys.stderr.isatty() else "\n"
        click.echo(f"starting the mesh … {elapsed_s:3.0f} s{end}", err=True, nl=False)


def _echo(text: str) -> None:
    click.echo(text, nl=False)
    sys.stdout.flush()
