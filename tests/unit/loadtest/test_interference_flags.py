from __future__ import annotations

import pytest
from click.testing import CliRunner

from loadtest.__main__ import main


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("interference", "--users=0"),
        ("interference", "--every-s=0"),
        ("interference", "--seconds=0"),
        ("interference", "--budget=0"),
        ("transfer", "--tokens=0"),
        ("transfer", "--repeat=0"),
        ("transfer", "--link-gbps=-1"),
        ("transfer", "--layout=70b"),
    ],
)
def test_a_value_that_makes_no_run_is_refused_by_name(command: str, flag: str) -> None:
    result = CliRunner().invoke(main, [command, flag])
    assert result.exit_code == 2
    assert flag.partition("=")[0] in result.stderr
