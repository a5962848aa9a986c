"""Two Ray nodes on this host, until standard input ends; prints the address to join.

The first has two devices, the second one: two actor ranks that are packed go on the first, and the
rollout rank on the second.
"""

import os
import sys

from minirl.ray_cluster import ENVIRONMENT, SLOT

os.environ.update(ENVIRONMENT)

from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 128 << 20

cluster = Cluster()
for slots in (2, 1):
    cluster.add_node(
        num_cpus=2,
        resources={SLOT: slots},
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
    )
sys.stdout.write(f"{cluster.address}\n")
sys.stdout.flush()
sys.stdin.read()
cluster.shutdown()
