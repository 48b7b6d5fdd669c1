"""Control-plane benchmark: ours beside Ray, ZeroMQ, MPI and UCX, all in one run (`python -m tools.bench_control`).

    __main__ ── run.py ──┬─ caller process of arm A ── its peers        order of the stages shuffled per repeat
       │                 ├─ caller process of arm B ── its peers        one stage measures at a time
       │                 └─ ...
       └─ summary.py, table.py

plan.py      what is measured: cells, arms, goals       spread.py      percentiles, medians over repeats
session.py   a caller process as the run sees it        caller.py      the program: times one arm's operations
peers.py     peers forked from one warm process         arm_*.py       one library each
startup.py   starts under srun, and of Ray              worker.py      what srun starts
"""
