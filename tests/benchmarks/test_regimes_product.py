"""The jobs of simulated runs, as the real product reads them."""

import regimes_product
from regime_simulation.scenario import Run, Scenario, Split

from isthmus.job import load_job

SMALL = Scenario(
    name="small", split=Split(clients=12, public_rows=200), run=Run(ticks=7, budget=4.0)
)


def test_the_job_of_a_simulated_run_is_read_back_from_its_file(tmp_path):
    job = regimes_product.product_job(SMALL, 3, tmp_path, "adaptive")
    assert (job.federated.clients, job.federated.secure_aggregation, job.rounds) == (12, True, 7)
    path = tmp_path / "job.toml"
    path.write_text(regimes_product.toml(job.model_dump(exclude_defaults=True)))
    assert load_job(path) == job
