"""Each target of the Makefile can be expanded; nothing is run."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TARGETS = re.findall(r"^([a-z][a-z0-9-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed here")
@pytest.mark.parametrize("target", TARGETS)
def test_the_recipe_of_each_target_expands(target):
    expanded = subprocess.run(["make", "-n", target], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert expanded.returncode == 0, expanded.stderr
    assert expanded.stdout.strip()
