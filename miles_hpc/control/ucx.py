"""The transport over UCX endpoints (ucxx)."""

from __future__ import annotations

from miles_hpc.control.tcp import TcpTransport
from miles_hpc.core.errors import UserError
from miles_hpc.core.transport import Credentials

__all__ = ["UcxTransport"]


class UcxTransport(TcpTransport):
    def __init__(self, credentials: Credentials) -> None:
        super().__init__(credentials)
        raise UserError("transport ucx: not available in this build; set control.transport = 'tcp'")
