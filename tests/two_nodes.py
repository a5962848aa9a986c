"""Two Ray nodes on this host, until standard input ends; prints the address to join.

Each has two devices: two actor ranks that are packed go on the first, the rollout ranks on the
second.
"""

import os
import sys

from minirl.ray_cluster import ENVIRONMENT, SLOT

os.environ.update(ENVIRONMENT)

from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 128 << 20

cluster = Cluster()
for _ in range(2):
    cluster.add_node(
        num_cpus=2,
        resources={SLOT: 2},
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
    )
sys.stdout.write(f"{cluster.address}\n")
sys.stdout.flush()
sys.stdin.read()
cluster.shutdown()
