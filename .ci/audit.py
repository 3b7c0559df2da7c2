"""Check with auditwheel that each wheel needs no newer glibc than its name promises, and no library beside it."""

import json
import pathlib
import re
import subprocess
import sys


def glibc(tag: str) -> tuple[int, int]:
    """(2, 28) for manylinux_2_28_x86_64; later than any for a tag that promises nothing."""
    found = re.search(r"manylinux_(\d+)_(\d+)_", tag)
    return (int(found[1]), int(found[2])) if found else (999, 0)


for wheel in sys.argv[1:]:
    show = [sys.executable, "-m", "auditwheel", "show", "--json", wheel]
    said = json.loads(subprocess.run(show, check=True, capture_output=True, text=True).stdout)
    name, tag = pathlib.Path(wheel).name, said["overall_tag"]
    print(f"{name}: consistent with {tag}")
    if glibc(tag) > glibc(name) or said["external_libs"]:
        sys.exit(f"{name} needs {tag} and {said['external_libs'] or 'no other library'}: more than its name promises")
