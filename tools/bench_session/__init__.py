"""The session server's cost, its routing, and how sessions lie on engines, each beside what it can be compared with.

| part | what is measured | beside |
|---|---|---|
| core.py | a turn in the session core, at 1k and 64k tokens of history | itself at the other length |
| surface.py | a turn through a real server over HTTP | the share of decoding the client's JSON |
| replay.py | hits and balance over a trace of agents, in simulated time | other policies; the trace's own bound |
| routed.py | requests through our routing, and a routing decision | sglang-router, in the same run |
"""
