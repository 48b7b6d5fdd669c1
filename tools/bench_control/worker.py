"""What the start-up arm has srun start: one worker that dials in, answers calls, and ends when it is told.

    srun -n64 python -P -m tools.bench_control.worker TRANSPORT ADDRESS SECRET_FILE

It imports nothing but the blocking face, as a rank's first steps would.
"""

import os
import sys

from miles_hpc.control.opening import open_blocking_transport
from miles_hpc.core.messages import Message, Shutdown
from miles_hpc.core.transport import BlockingEndpoint, Credentials, PeerIdentity

_JOIN_S = 60.0
_LIFE_S = 120.0


def main() -> int:
    kind, address, secret_file = sys.argv[1:]
    with open(secret_file, "rb") as file:
        secret = file.read()
    rank = int(os.environ["SLURM_PROCID"])
    host = os.environ["SLURMD_NODENAME"]
    told = False

    def handler(endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> None:
        nonlocal told
        told = told or isinstance(message, Shutdown)

    mine = PeerIdentity(
        role="rollout", name=f"rollout-{host}-{rank}", host=host, pid=os.getpid(), attempt=1, term=1, rank=rank
    )
    transport = open_blocking_transport(kind, Credentials(secret, mine), spin_s=0.0)
    endpoint = transport.connect(address, handler, deadline_s=_JOIN_S)
    ended = transport.serve(lambda: told or endpoint.closed, deadline_s=_LIFE_S)
    transport.close()
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main())
