"""Commands of the command line, called in this process."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from actors.cli import app


def invoke(*arguments: object) -> Result:
    """What a command has said and how it ended; what it did not expect is raised here."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def call(*arguments: object) -> str:
    """The stdout of a command that succeeds."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def outcome(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    result = invoke(*arguments)
    return result.exit_code, result.stdout, result.stderr
