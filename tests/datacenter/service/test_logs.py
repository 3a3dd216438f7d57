"""Deletion of old logs."""

from __future__ import annotations

from pathlib import Path

from isthmus_datacenter.service.logs import delete_old_logs


def test_the_output_of_the_last_ten_generations_is_kept(tmp_path: Path) -> None:
    for number in range(8, 20):
        (tmp_path / f"agent-{number}.log").touch()
        (tmp_path / f"generation-{number}_x1y2" / "attempt_0").mkdir(parents=True)
    (tmp_path / "notes.txt").touch()
    delete_old_logs(tmp_path, starting_generation=8)
    expected = {f"agent-{number}.log" for number in (8, *range(10, 20))}
    expected |= {f"generation-{number}_x1y2" for number in (8, *range(10, 20))}
    assert {path.name for path in tmp_path.iterdir()} == expected | {"notes.txt"}
