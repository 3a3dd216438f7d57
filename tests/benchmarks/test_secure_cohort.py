"""The benchmark of secure cohorts: a real server, and real devices in another process."""

import secure_cohort


def test_a_cohort_completes_a_secure_round():
    figures = secure_cohort.secure_round(3, parameters=1000, processes=1)
    assert figures.keys() == {"seconds", "server_cpu_seconds", "device_cpu_seconds"}
    assert all(value > 0 for value in figures.values())
