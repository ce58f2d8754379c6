"""The timeline shows each operation under its full name, in a row that says whose it is."""

from __future__ import annotations

from cluster.timeline import relabelled


def test_operations_have_their_names_and_rows_their_actors() -> None:
    forward = {"cat": "task::forward[17]", "name": "forward", "tid": "worker:ab", "ts": 1.0, "dur": 2.0}
    inner = {"cat": "task:execute", "name": "task:execute", "tid": "worker:ab", "ts": 1.5, "dur": 1.0}
    driver = {"cat": "submit_task", "name": "submit_task", "tid": "driver:cd", "ts": 0.5, "dur": 0.1}
    assert relabelled([forward, inner, driver], {"ab": "compute (7)"}) == [
        forward | {"name": "forward[17]", "tid": "compute (7): forward"},
        inner | {"tid": "compute (7): calls"},
        driver,
    ]
