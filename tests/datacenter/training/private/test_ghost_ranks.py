"""Ghost clipping on real ranks: whatever is sharded, the sum is that of batches of one."""

from pathlib import Path

import pytest
import torch
from tests.privacy.dp_sgd.test_private_gradients import one_by_one

from isthmus.job import Job, with_changes
from isthmus.task import Participant, load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout

HERE = Path(__file__).parents[2]
SHAKESPEARE = Path(__file__).parents[4] / "examples" / "shakespeare"
CLIP, BATCH, SEED = 0.3, 4, 5
DECODER = {
    "public_speakers": ["SPEAKER"],
    "context": 12,
    "model": {"width": 16, "head_width": 8, "depth": 2},
    "datacenter_lr": 0.01,
}


class Opened:
    """A job on two or more ranks, as a server opens it."""

    def __init__(
        self,
        source,
        stage,
        settings=None,
        clipping="ghost",
        data=None,
        base=HERE,
        noise=1e-9,
        **layout,
    ):
        job = Job.model_validate(
            {
                "name": "private",
                "seed": SEED,
                "task": {"source": source, "settings": settings or {}},
                "datacenter": {
                    "ranks": 2,
                    **layout,
                    "zero_stage": stage,
                    "batch_size": BATCH,
                    "privacy": {
                        "epsilon": 1.0,
                        "delta": 1e-4,
                        "examples": 50,
                        "clip": CLIP,
                        "noise": noise,
                        "clipping": clipping,
                    },
                },
            }
        )
        job = with_changes(job, {})
        self.task = load_task(source, job.task.settings, base=base, data=data)
        self.data = self.task.local_data(Participant(name="test", regime="datacenter"))
        job = with_changes(job, {"datacenter.privacy.examples": len(self.data)})
        self.model = build_model(self.task, job.seed)
        self.command = {
            "op": "open",
            "run_id": "run",
            "job": job.model_dump_json(),
            "base": str(base),
            "data": None if data is None else str(data),
            "layout": TensorLayout.of(self.model).header.decode("latin-1"),
        }

    def expected(self, indices):
        """The sum of the clipped gradients of some examples: (N)."""
        rows = [self.data[index] for index in indices]
        rows = [(row, torch.as_tensor(target)) for row, target in rows]
        return one_by_one(self.task, self.model, rows, CLIP)

    def flat(self, sums):
        named = self.model.named_parameters()
        return torch.cat([torch.tensor(sums[name]) for name, each in named if each.requires_grad])


DRAWS = {
    "both": [[1, 3, 5, 9, 11, 13], [2, 4]],
    "one": [[], list(range(10, 23))],  # several passes, and none
    "none": [[], []],
}
FINITE = [index for index in range(50) if index not in (7, 8)]


@pytest.fixture(scope="module")
def plays(tmp_path_factory):
    path = tmp_path_factory.mktemp("plays") / "plays.txt"
    lines = " ".join(f"To be {n} or not to be {n * n}" for n in range(60))
    path.write_text(f"SPEAKER:\n{lines}\n\nANOTHER:\nno\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_layout_sums_the_same(stage, on_ranks, tmp_path, plays):
    operations, runs = [], []
    for source, settings, data, base in (
        ("tasks.py:Table", {}, None, HERE),
        ("tasks.py:Pictures", {}, None, HERE),
        ("tasks.py:Gpt", {}, None, HERE),  # a decoder with tied embeddings
        ("task.py:Shakespeare", DECODER, plays, SHAKESPEARE),
    ):
        opened = Opened(source, stage, settings, data=data, base=base)
        for name, draws in DRAWS.items():
            operations.append((opened.command, draws, str(tmp_path / f"{source}{name}")))
            runs.append((opened, draws))
    for rank_sums in on_ranks(2, "private_sums", operations):
        for (opened, draws), sums in zip(runs, rank_sums, strict=True):
            found = opened.flat(sums)
            indices = [*draws[0], *draws[1]]
            expected = opened.expected(indices) if indices else torch.zeros_like(found)
            torch.testing.assert_close(found, expected, rtol=3e-4, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_with_other_shapes_and_examples_that_are_not_finite(stage, on_ranks, tmp_path):
    opened = Opened("private_tasks.py:Ragged", stage)
    cases = [
        [[1, 2, 3, 4, 5, 6], [9]],  # two groups, and one
        [[7, 1, 8, 2], [9, 10]],  # bad ones in both groups of one rank
        [[7], []],  # one of a rank that is alone with it
        [[7, 8], [8, 7]],
    ]
    operations = [
        (opened.command, draws, str(tmp_path / f"{number}")) for number, draws in enumerate(cases)
    ]
    for rank_sums in on_ranks(2, "private_sums", operations):
        for draws, sums in zip(cases, rank_sums, strict=True):
            found = opened.flat(sums)
            indices = [index for index in (*draws[0], *draws[1]) if index in FINITE]
            expected = opened.expected(indices) if indices else torch.zeros_like(found)
            torch.testing.assert_close(found, expected, rtol=3e-4, atol=1e-6)


def test_groups_of_shards_sum_the_same_and_have_their_noise_once(on_ranks, tmp_path):
    """Two groups of two ranks: each has the whole model, and both must go on with one gradient."""
    draws = [[1, 5, 9], [2, 6, 10], [], [0, 4]]
    clear = Opened("tasks.py:Table", 3, ranks=4, shard_groups=2)
    noisy = Opened("tasks.py:Table", 1, ranks=4, shard_groups=2, noise=100.0)
    operations = [
        (opened.command, draws, str(tmp_path / f"{number}"))
        for number, opened in enumerate((clear, noisy))
    ]
    results = on_ranks(4, "private_sums", operations)
    expected = clear.expected([index for some in draws for index in some])
    for sums, _ in results:
        torch.testing.assert_close(clear.flat(sums), expected, rtol=3e-4, atol=1e-6)
    noise = [noisy.flat(sums) for _, sums in results]
    assert all(torch.equal(noise[0], each) for each in noise)
    assert float(noise[0].std()) == pytest.approx(100 * CLIP, rel=0.3)
