"""When an engine or a front end is started again."""

from __future__ import annotations

from bridge.supervisor.policy import FRONT_END_LIMIT, Restart, RestartPolicy, Restarts, front_end_delay


def delays(policy: RestartPolicy, *times: float) -> list[float | None]:
    restarts = Restarts(policy)
    return [restarts.next_delay(time) for time in times]


def test_never_is_never() -> None:
    assert delays(RestartPolicy(restart=Restart.NEVER), 0.0) == [None]


def test_on_failure_has_a_limit_and_waits_twice_as_long_each_time() -> None:
    policy = RestartPolicy(restart=Restart.ON_FAILURE, limit=3, window_s=100, delay_s=1, max_delay_s=3)
    assert delays(policy, 0, 10, 20, 30) == [1, 2, 3, None]


def test_what_is_older_than_the_window_is_forgotten() -> None:
    policy = RestartPolicy(restart=Restart.ON_FAILURE, limit=2, window_s=100, delay_s=1)
    assert delays(policy, 0, 10, 200, 210, 220) == [1, 2, 1, 2, None]


def test_always_has_a_longest_wait_and_no_limit() -> None:
    policy = RestartPolicy(restart=Restart.ALWAYS, limit=1, window_s=1e9, delay_s=1, max_delay_s=8)
    assert delays(policy, *range(100))[-1] == 8


def test_a_front_end_that_served_is_replaced_at_once_and_one_that_never_does_ends_the_run() -> None:
    found = [front_end_delay(failures) for failures in range(FRONT_END_LIMIT + 1)]
    assert found[0] == 0.0 and found[-1] is None
    waits = [wait for wait in found if wait is not None]
    assert waits == sorted(waits)
