"""From the rows of a data set to batches: nested structures, collators, orders, streams."""

import collections
import dataclasses
import itertools

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from isthmus.errors import TaskError
from isthmus.task import load_task
from isthmus.task.scoring import batches, map_tensors
from isthmus.task.scoring.inputs import endless, streamed_batches
from isthmus.task.scoring.order import EpochOrder, check_no_order

CPU = torch.device("cpu")
DATA = TensorDataset(torch.arange(6), torch.arange(6))

BUCKETS = """
def order(self, dataset, batch_size, generator):
    pairs = torch.arange(len(dataset)).view(-1, 2)
    return pairs[torch.randperm(len(pairs), generator=generator)].flatten()
"""


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


@pytest.fixture
def load(write_task, tmp_path):
    def load(methods="pass"):
        write_task(methods)
        return load_task("task.py:Learn", {}, base=tmp_path)

    return load


class Encoding(collections.UserDict):
    """As a `BatchEncoding` of Hugging Face: a mapping that is no dict, with a state of its own."""

    def __init__(self, data):
        super().__init__(data)
        self.origin = "tokenizer"


@dataclasses.dataclass
class Graph:
    nodes: torch.Tensor
    name: str


def test_tensors_in_any_structure_are_mapped_and_the_structure_is_kept():
    one = torch.ones(1)
    value = Encoding({"ids": one, "more": [Graph(one, "g"), (one, None)]})
    mapped = map_tensors(lambda each: each + 1, value)
    assert isinstance(mapped, Encoding)
    assert mapped.origin == "tokenizer"
    graph, (number, nothing) = mapped["more"]
    assert [mapped["ids"], graph.nodes, number] == [torch.tensor([2.0])] * 3
    assert (graph.name, nothing, value["ids"]) == ("g", None, one)


def test_a_collator_and_rows_of_dictionaries(load):
    task = load("""
        def collate(self, rows):
            widths = [len(row["ids"]) for row in rows]
            ids = [row["ids"] + [0] * (max(widths) - len(row["ids"])) for row in rows]
            return {"ids": torch.tensor(ids), "labels": torch.tensor(widths)}

        def inputs_and_target(self, batch):
            return batch["ids"], batch["labels"]
    """)
    rows = [{"ids": [1]}, {"ids": [2, 3, 4]}, {"ids": [5, 6]}]
    found = [(x.tolist(), y.tolist()) for x, y in batches(task, rows, [2, 0, 1], 2, CPU)]
    assert found == [([[5, 6], [1, 0]], [2, 1]), ([[2, 3, 4]], [3])]
    del type(task).inputs_and_target
    with pytest.raises(TaskError, match=r"not dict; return pairs, or define inputs_and_target"):
        next(batches(task, rows, [0], 1, CPU))


def test_a_collator_set_in_the_constructor_is_used(load):
    task = load()
    task.collate = lambda rows: (torch.tensor([x for x, _ in rows]).sum(), None)
    assert next(batches(task, DATA, [1, 2], 2, CPU))[0] == 3


def test_an_order_of_the_task_is_a_function_of_the_generator(load):
    task = load(BUCKETS)
    order = EpochOrder(task, DATA, 6, 2)
    epochs = [order.epoch(torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2, 3)]
    assert epochs[0] == epochs[1]
    assert len(set(map(tuple, epochs))) > 1
    assert order.length == 6
    assert all(epochs[3][at + 1] == epochs[3][at] + 1 for at in (0, 2, 4))


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("[0, 6]", "order() returned indices from 0 to 6, and the data set has 6 examples"),
        ("[]", "order() must return a sequence of indices"),
        ("torch.rand(3)", "order() must return a sequence of indices"),
        ("1 / 0", "order() failed at"),
        (
            "range(int(torch.randint(1, 6, (), generator=generator)))",
            "for another epoch; return equally many",
        ),
    ],
)
def test_an_order_that_cannot_be_used_is_refused(load, returned, sentence):
    task = load(f"def order(self, dataset, batch_size, generator):\n    return {returned}")
    order = EpochOrder(task, DATA, 6, 2)
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(TaskError) as caught:
        [order.epoch(generator) for _ in range(20)]
    assert sentence in str(caught.value)


def test_an_order_of_a_stream_is_refused(load):
    check_no_order(load(), "it")
    with pytest.raises(TaskError, match=r"^order\(\) chooses examples by index, and it is an iter"):
        check_no_order(load(BUCKETS), "it")


def test_a_stream_is_repeated_from_any_example(load):
    assert list(itertools.islice(endless(Stream(3), 4), 5)) == [1, 2, 0, 1, 2]
    task = load()
    found = [each.tolist() for each in streamed_batches(task, Stream(3), 2, 5, 2, CPU)]
    assert found == [[2, 0], [1, 2], [0]]
    with pytest.raises(TaskError, match="without any example"):
        next(endless(Stream(0), 0))
