"""Optional job accounting: a private mariadb and slurmdbd below the box's root, for tests of sacct itself.

sacct lags behind the controller by some seconds; the history file needs no daemon (history.py).
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import UserError
from tools.slurm_box.plan import Plan
from tools.slurm_box.processes import find_binary, spawn, wait_until

__all__ = ["PROGRAMS", "register_cluster", "start_database", "start_slurmdbd"]

PROGRAMS = ("mariadbd", "mariadb-install-db", "mariadb", "slurmdbd", "sacctmgr")


def _socket(plan: Plan) -> Path:
    return plan.root / "db" / "sock"


def _quiet(argv: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=dict(environ), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def start_database(plan: Plan, environ: Mapping[str, str], record: Path, deadline: Deadline) -> None:
    """mariadbd on a unix socket only; its tables are created on the first start. Returns when it answers."""
    data, log = plan.root / "db" / "data", plan.root / "log" / "mariadb.log"
    common = ["--no-defaults", f"--datadir={data}", f"--user={plan.user}"]
    if not (data / "mysql").exists():
        login = ["--auth-root-authentication-method=socket", f"--auth-root-socket-user={plan.user}", "--skip-test-db"]
        made = _quiet([find_binary("mariadb-install-db"), *common, *login], environ)
        if made.returncode:
            raise UserError(f"mariadb-install-db failed: {(made.stderr or made.stdout).strip().splitlines()[-1:]}")
    process = spawn(
        [
            find_binary("mariadbd"),
            *common,
            f"--socket={_socket(plan)}",
            "--skip-networking",
            f"--pid-file={plan.root}/run/mariadb.pid",
            f"--log-error={log}",
            "--innodb-flush-log-at-trx-commit=0",
        ],
        environ,
        log=log,
        record=record,
    )
    create = "create database if not exists slurm_acct_db"
    client = [find_binary("mariadb"), "--no-defaults", "-S", str(_socket(plan)), "-e", create]

    def answers() -> bool:
        if not process.alive:
            raise UserError(f"mariadbd ended at its start; expected a database below {data} (see {log})")
        return _quiet(client, environ).returncode == 0

    wait_until(answers, deadline, poll_s=0.1)


def start_slurmdbd(plan: Plan, environ: Mapping[str, str], record: Path) -> None:
    """slurmdbd against that database; MYSQL_UNIX_PORT is how its client library finds the socket."""
    conf = plan.root / "slurmdbd.conf"
    conf.touch(mode=0o600)
    conf.write_text(plan.slurmdbd_conf())
    log = plan.root / "log" / "slurmdbd.out"
    spawn([find_binary("slurmdbd"), "-D"], {**environ, "MYSQL_UNIX_PORT": str(_socket(plan))}, log=log, record=record)


def register_cluster(plan: Plan, environ: Mapping[str, str], deadline: Deadline) -> None:
    """Make the cluster known to slurmdbd; returns when slurmdbd lists it."""
    name, sacctmgr = plan.spec.cluster, find_binary("sacctmgr")

    def listed() -> bool:
        _quiet([sacctmgr, "-i", "add", "cluster", name], environ)
        known = _quiet([sacctmgr, "-n", "-P", "list", "cluster", "format=cluster"], environ)
        return name in known.stdout.split()

    wait_until(listed, deadline, poll_s=0.2)
