"""What the ucx carrier uses of UCX, and which Python package gives it: ucxx, or ucx-py where a site has that.

    UcxApi    one UCX worker: descriptor to wait on, progress, arm, address
    ├─ Path   one UCX endpoint: messages under a tag, to one other worker
    └─ Inbox  what arrives under one tag, in order: small messages by one buffer of all, pieces straight to their place

Callbacks run inside `progress`, in the order of the messages; never inside UCX, where progress must not be called, and
never inside `send`. Nothing of an idle peer is looked at: `progress` costs the same
with one and with 500 of them, plus what has arrived and who has something on its way.

    ucx_by_ucxx.py   ucxx                 ucx_by_ucp.py   ucx-py
"""

from __future__ import annotations

import ctypes
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable

from miles_hpc.core.errors import UserError
from miles_hpc.core.transport import Buffer

__all__ = ["MESSAGE_BYTES", "Done", "Inbox", "Path", "UcxApi", "devices", "find_ucx", "lanes", "library_file"]

#: The largest small message.
MESSAGE_BYTES = 20 * 1024

Done = Callable[[], None]

#: What UCX is told, unless the user has told it something. It reads the environment when it's loaded and opened.
_SETTINGS = {
    # Else its TCP connects in blocking calls: a peer that went out of reach would stop the loop for minutes.
    "UCX_TCP_CONN_NB": "y",
    # The Python packages set variables that this UCX may not know; it would say so on standard output.
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}


class Path(ABC):
    """One UCX endpoint, made with error handling: `failed` is called once when UCX finds that the peer is gone."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False once UCX has given it up."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether something that was sent is still in UCX's hands."""

    @abstractmethod
    def send(self, tag: int, data: Buffer, done: Done) -> bool:
        """Send one message. True when the buffer isn't needed any more; else `done` follows when that is so.

        A path that has failed sends nothing, and `done` never follows: UCX 1.21 spins for ever when something is sent
        on an endpoint that has failed.
        """

    @abstractmethod
    def handle(self) -> int:
        """The ucp_ep_h."""

    @abstractmethod
    def close(self) -> None:
        """Close it; only when it has failed or isn't busy. No callback follows."""


class Inbox(ABC):
    """What arrives under one tag: small messages, and pieces whenever they were announced."""

    @abstractmethod
    def attach(self, path: Path) -> None:
        """Whose messages they are: receives end with that path. Nothing is delivered before. It may change later."""

    @abstractmethod
    def listen(self, on_message: Callable[[memoryview], None]) -> None:
        """Take small messages: `on_message` gets their bytes, in memory that is used again afterwards.

        ucx-py doesn't tell a message's length: there, bytes of an earlier message may follow.
        """

    @abstractmethod
    def expect_piece(self, target: memoryview, done: Done) -> None:
        """Inside `on_message` only: the next message fills `target` exactly, after those announced before."""

    @abstractmethod
    def close(self) -> None:
        """Drop what arrives from now on. No callback follows."""


class UcxApi(ABC):
    """One UCX context and worker."""

    #: Package and version.
    package: str
    #: Readable when `progress` has something to do, once `arm` returned True.
    fd: int
    #: Where other workers reach this one.
    address: bytes

    @abstractmethod
    def connect(self, address: bytes, failed: Callable[[str], None]) -> Path:
        """A path to another worker. Raises ConnectionError when UCX knows no way there."""

    @abstractmethod
    def inbox(self, tag: int, failed: Callable[[str], None]) -> Inbox:
        """Take what arrives under `tag`. `failed` is called once, for a message that wasn't expected."""

    @abstractmethod
    def progress(self) -> bool:
        """Let UCX work and run callbacks. Returns whether there was anything."""

    @abstractmethod
    def arm(self) -> bool:
        """Make `fd` tell of the next event. False when there is something to do already."""

    @abstractmethod
    def version(self) -> str:
        """UCX's own version."""

    @abstractmethod
    def settings(self) -> dict[str, str]:
        """UCX's settings by name, without the prefix UCX_."""

    @abstractmethod
    def context_info(self) -> str:
        """What ucp_context_print_info prints."""

    @abstractmethod
    def close(self) -> None:
        """Release the worker; paths and inboxes were closed before. One that isn't closed stays until the process
        ends, and isn't touched then either: with something left to send that could crash."""


def find_ucx() -> Callable[[], UcxApi]:
    """What opens a worker with the package that this process has. Raises UserError when there is none.

    Loads UCX. In a process that uses MPI as well, call it before MPI is loaded, and in all ranks: an MPI brings a UCX
    of its own, of which a process can have one only, and MPICH 5.0.2 runs on the newer one of ucxx, but not the other
    way round. Where both use the site's UCX the order doesn't matter.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ucxx._lib.libucxx as ucxx
    except OSError as error:
        raise UserError(
            f"transport ucx: {error}; another UCX is loaded already ({library_file() or 'by MPI'}): have ucxx use the "
            "same one by RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true, or set transport = 'tcp'"
        ) from error
    except ImportError as missing:
        try:
            from ucp._libs import ucx_api as ucp
        except (ImportError, OSError):
            raise UserError(
                f"transport ucx: {missing}; install ucxx (pip install ucxx-cu12 or ucxx-cu13), or set transport = 'tcp'"
            ) from missing
        from miles_hpc.control.ucx_by_ucp import UcpApi

        return functools.partial(UcpApi, ucp)
    if not hasattr(ucxx.UCXEndpoint, "tag_recv_with_handle"):
        raise UserError("transport ucx: this ucxx is too old; install ucxx 0.47 or newer, or set transport = 'tcp'")
    from miles_hpc.control.ucx_by_ucxx import UcxxApi

    return functools.partial(UcxxApi, ucxx)


# ------------------------------------------------------------------------------------------------ what UCX chose


def devices(context_info: str) -> list[str]:
    """The transports and devices that UCX may use, such as "rc_mlx5/mlx5_0:1", from ucp_context_print_info's text."""
    lines = (line.split() for line in context_info.splitlines())
    return [words[-1] for words in lines if len(words) > 2 and words[:2] == ["#", "resource"] and "/" in words[-1]]


class _Entry(ctypes.Structure):
    _fields_ = [("transport", ctypes.c_char_p), ("device", ctypes.c_char_p)]


class _Transports(ctypes.Structure):
    _fields_ = [("entries", ctypes.POINTER(_Entry)), ("n", ctypes.c_uint), ("entry_bytes", ctypes.c_size_t)]


class _EndpointAttributes(ctypes.Structure):
    """ucp_ep_attr_t of ucp/api/ucp.h, whose `field_mask` makes it the same for all versions."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_char * 128),
        ("remote", ctypes.c_char * 128),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    ]


_FIELD_TRANSPORTS = 1 << 3
_MAX_LANES = 32


def lanes(endpoint: int) -> list[str]:
    """The transports and devices that an endpoint (a ucp_ep_h) really uses, such as "tcp/eth0"; empty if UCX won't say.

    By ucp_ep_query, which neither package offers, of the libucp that is loaded already.
    """
    if not endpoint:
        return []
    try:
        query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    except (OSError, AttributeError):
        return []
    entries = (_Entry * _MAX_LANES)()
    attributes = _EndpointAttributes(field_mask=_FIELD_TRANSPORTS)
    attributes.transports = _Transports(entries, _MAX_LANES, ctypes.sizeof(_Entry))
    query.argtypes = [ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes)]
    if query(endpoint, ctypes.byref(attributes)) != 0:
        return []
    found = (entry for entry in entries[: min(attributes.transports.n, _MAX_LANES)] if entry.transport)
    return list(dict.fromkeys(f"{e.transport.decode()}/{(e.device or b'').decode()}" for e in found))


def library_file() -> str:
    """Which libucp this process has loaded: the site's, or the one of a package. Empty before it's loaded."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            words = line.split(maxsplit=5)
            if len(words) == 6 and "/libucp.so" in words[5]:
                return words[5].strip()
    return ""
