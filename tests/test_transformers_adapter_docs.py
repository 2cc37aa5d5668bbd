"""The page about transformers says what is true: its example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_example_has_10_lines_and_runs():
    [program] = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8"), re.S
    )
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "My fellow Americans," in done.stdout and "In the beginning" in done.stdout


def test_the_bench_gives_the_name_back_to_the_library():
    """Its folder stands first on the path of every script beside it."""
    program = (
        "import sys; sys.path.insert(0, 'bench'); import transformers; print(transformers.NemotronHConfig.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.stdout.strip() == "NemotronHConfig", done.stderr
