"""Nothing depends on the clocks of two machines agreeing: the wall clock is read in one place, to be shown."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALL_CLOCKS = {"time", "time_ns", "now", "utcnow", "today", "fromtimestamp", "st_mtime", "st_ctime", "st_mtime_ns"}
SHOWN = [("storage/checkpoint_actor.py", "now")]
"""When an epoch was claimed: told in messages, compared with nothing."""


def wall_clock_uses(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in WALL_CLOCKS:
            yield node.attr
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (name.name for name in node.names if name.name in WALL_CLOCKS)


def test_the_wall_clock_is_read_in_one_place() -> None:
    files = [path for package in ("app", "workers", "storage") for path in sorted((ROOT / package).glob("*.py"))]
    assert len(files) > 50
    found = [(str(path.relative_to(ROOT)), use) for path in files for use in wall_clock_uses(path)]
    assert found == SHOWN
    for path in files:
        if path.name not in ("checkpoint_actor.py", "records.py"):
            claimed = [line for line in path.read_text().splitlines() if "claimed_at" in line]
            assert all('f"' in line for line in claimed), "only shown"


def test_it_sees_a_wall_clock(tmp_path: Path) -> None:
    source = tmp_path / "late.py"
    source.write_text("import time\nfrom time import time_ns\nx = time.time() - path.stat().st_mtime")
    assert sorted(wall_clock_uses(source)) == ["st_mtime", "time", "time_ns"]
