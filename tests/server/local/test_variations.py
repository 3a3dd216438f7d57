"""The values of `--vary`."""

import pytest

from isthmus.errors import JobError
from isthmus_server.local.variations import combinations


@pytest.mark.parametrize("keys", [("task.settings", "task.settings.lr"), ("a.b.c", "a")])
def test_a_table_is_not_varied_together_with_a_key_in_it(keys):
    with pytest.raises(JobError, match=r"^--vary \S+ replaces all of the table that has \S+; vary"):
        combinations([(key, [1, 2]) for key in keys])


def test_keys_that_begin_alike_are_varied_together():
    assert len(combinations([("task.a", [1, 2]), ("task.ab", [1, 2])])) == 4
