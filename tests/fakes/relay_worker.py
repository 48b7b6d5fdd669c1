"""A process that passes commands on, for tests and benchmarks with real processes.

    python -m tests.fakes.relay_worker KIND NAME FOLDER     FOLDER/secret.key is the run's secret

It prints its address, and adds a line to FOLDER/NAME.ran whenever its own handler runs. The handler of an EndSession
waits until the file FOLDER/<session_id> exists, unless that id is empty. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from miles_hpc.control.auth import load_secret
from miles_hpc.control.links import Links
from miles_hpc.control.opening import open_transport
from miles_hpc.control.relay import RelayHandler
from miles_hpc.core.messages import ChildEvent, EndSession, Message
from miles_hpc.core.transport import Buffer, Credentials, Endpoint, PeerIdentity


async def main(kind: str, name: str, folder: Path) -> None:
    identity = PeerIdentity(role="rollout", name=name, host="host", pid=os.getpid(), attempt=1, term=1)
    transport = open_transport(kind, Credentials(load_secret(folder / "secret.key"), identity))

    async def handle(endpoint: Endpoint, message: Message, payload: memoryview) -> tuple[Message, list[Buffer]]:
        with (folder / f"{name}.ran").open("a") as file:
            file.write(f"{type(message).__name__} from {endpoint.peer.name}\n")
        if isinstance(message, EndSession) and message.session_id:
            while not (folder / message.session_id).exists():
                await asyncio.sleep(0.02)
        return ChildEvent(child=name, exit_code=len(payload)), [payload[:16]]

    links = Links(transport)
    listener = await transport.listen(RelayHandler(handle, links, name=name))
    print(listener.address, flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
    await ended.wait()
    await asyncio.gather(listener.close(), links.close())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
