"""A Ray cluster of this machine, in a process of its own: `python ray_cluster.py NODES CPUS`.

It prints its address, and listens: `kill` kills the last node with all its processes, `add` adds
one, and the end of the input ends the cluster. `RAY_TMPDIR` is where Ray has its files.
"""

import os
import sys
from pathlib import Path

MEMORY = 78643200
FAST = {"health_check_period_ms": 1000, "health_check_timeout_ms": 20000}
"""How soon a lost node is noticed, which takes half a minute by default."""


def main(nodes: int, cpus: int) -> None:
    # Here, as the tests' modules are also read where there is no Ray.
    import ray
    from ray.cluster_utils import Cluster

    same = {"num_cpus": cpus, "object_store_memory": MEMORY, "include_dashboard": False}
    Path(os.environ["RAY_TMPDIR"], "ray").mkdir(exist_ok=True)
    cluster = Cluster()
    cluster.add_node(**same, _system_config=FAST)
    others = [cluster.add_node(**same) for _ in range(nodes - 1)]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "kill\n":
            cluster.remove_node(others.pop(), allow_graceful=False)
        else:
            others.append(cluster.add_node(**same))
        print("done", flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
