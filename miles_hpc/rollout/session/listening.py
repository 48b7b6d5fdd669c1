"""Where a session server listens, and how its node's agent and its users learn of it.

    address file         JSON of ServerAddress, published when the server is ready
    address file.token   the server's own token, mode 0600: who may read it may open sessions

Only this node can reach the server: a loopback address, or a Unix socket that its user alone may connect to. Tokens
travel in the clear there.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from pathlib import Path

import msgspec

from checkpoints.publish import publish_bytes
from miles_hpc.core.errors import UserError

__all__ = ["ServerAddress", "bind", "publish_address", "read_address", "read_token", "token_file"]

_MOST_PATH_BYTES = 107  # sun_path of unix(7), less its end
_BACKLOG = 1024


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`http` is `http://127.0.0.1:PORT` or `unix:PATH`; `control` is for the agent's transport."""

    http: str
    control: str
    instance_id: str
    pid: int


def bind(listen: str) -> tuple[socket.socket, str]:
    """A listening socket for `HOST:PORT` (port 0: any) or `unix:PATH`, and its address as ServerAddress has it.

    Raises UserError for an address that others could reach, or that is in use.
    """
    if listen.startswith("unix:"):
        path = Path(listen.removeprefix("unix:")).absolute()
        return _bind_unix(path), f"unix:{path}"
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not colon or not port.isdecimal() or int(port) > 65535 or not loopback:
        raise UserError(f"--listen {listen!r}: expected a loopback address such as 127.0.0.1:0, or unix:PATH")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, int(port)))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise UserError(f"--listen {listen!r}: {error.strerror}: choose another port, or 0 for any") from error
    shown = f"[{host}]" if ":" in host else host
    return listening, f"http://{shown}:{listening.getsockname()[1]}"


def _bind_unix(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise UserError(f"--listen unix:{path}: longer than {_MOST_PATH_BYTES} bytes: choose a shorter path")
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # the socket's mode is right from its first moment on
    try:
        listening.bind(str(path))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise UserError(f"--listen unix:{path}: {error.strerror}: choose a folder of yours") from error
    finally:
        os.umask(before)
    return listening


def _remove_stale(path: Path) -> None:
    """A server that was killed leaves its socket; one that answers keeps it."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UserError(f"--listen unix:{path}: there is something else than a socket: choose another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise UserError(f"--listen unix:{path}: {error.strerror}: choose another path") from error
    raise UserError(f"--listen unix:{path}: another server listens there: choose another path")


def token_file(address_file: Path) -> Path:
    """Where the token of the server of that address file is."""
    return address_file.with_name(address_file.name + ".token")


def publish_address(address_file: Path, address: ServerAddress, token: str) -> None:
    """The token first: who sees the address finds it."""
    publish_bytes(token_file(address_file), token.encode() + b"\n", mode=0o600, durable=False)
    publish_bytes(address_file, msgspec.json.encode(address) + b"\n", durable=False)


def read_address(address_file: Path) -> ServerAddress:
    """Raises UserError when there is none, or something else."""
    try:
        return msgspec.json.decode(address_file.read_bytes(), type=ServerAddress)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"session server's address {address_file}: {error}: is the server started?") from error


def read_token(address_file: Path) -> str:
    """The server's token. Raises UserError when it isn't there."""
    try:
        return token_file(address_file).read_text().strip()
    except OSError as error:
        raise UserError(f"session server's token {token_file(address_file)}: {error.strerror}") from error
