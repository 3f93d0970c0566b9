"""The command `diptych`: a mesh on this machine, and clients of a running one."""

from __future__ import annotations

import importlib

import click

# Loaded when they are used: `up` must not import gRPC, and `--help` should not wait for it.
_COMMANDS = {
    "up": ("services.cli.up", "Run a mesh on this machine."),
    "generate": ("services.cli.generate", "Ask a running mesh."),
    "workers": ("services.cli.workers", "List the workers of a running mesh."),
    "demo": ("services.cli.demo", "Start a mesh, ask it one question, stop it."),
}


class _Lazy(click.Group):
    """A group whose commands are imported by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = vars(importlib.import_module(_COMMANDS[cmd_name][0]))[cmd_name]
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in _COMMANDS.items()])


main = _Lazy("diptych", help=__doc__)

if __name__ == "__main__":
    main(prog_name="diptych")
