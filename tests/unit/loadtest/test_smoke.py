from __future__ import annotations

import pytest
from click.testing import CliRunner

from loadtest.__main__ import main


@pytest.mark.parametrize("flag", ["--rate=0", "--rate=-1", "--seconds=-1", "--limit-s=0"])
def test_a_number_that_makes_no_run_is_refused_by_name(flag: str) -> None:
    """A rate of 0 ended in a traceback."""
    result = CliRunner().invoke(main, ["smoke", flag, "--grpc", "127.0.0.1:1"])
    assert result.exit_code == 2
    assert flag.partition("=")[0] in result.stderr
