"""Versions of the package and of what leaves a process (messages, files)."""

__version__ = "0.1.0"

#: Version of the message vocabulary; both ends of an endpoint must have the same one.
PROTOCOL_VERSION = 4

#: Version of the files in a run directory (journal records, manifests, payloads).
FORMAT_VERSION = 1
