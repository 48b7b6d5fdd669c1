"""A key that can be set does something: code reads every field of the run and site files."""

from __future__ import annotations

import ast

import pytest

import miles_hpc.core.config as config
from tests.architecture.test_imports import REPOSITORY, modules

#: Facts that `cluster.site_facts` shows and looks for by their names, not one by one.
FACTS = {
    "SiteContainer",
    "SiteFabric",
    "SiteFileSystem",
    "SiteLifecycle",
    "SiteNode",
    "SitePorts",
    "SiteStripe",
    "SiteTopology",
}
#: Marked "for readers" or "reserved" at the field, or shown as a fact.
READ_BY_PEOPLE = {
    "SiteConfig.container",
    "SiteConfig.inherits",  # load reads it before there is a struct
    "SiteConfig.mpi_flavours",
    "SiteConfig.notes",
    "SiteConfig.slurm_version_seen",
    "SitePartition.max_submitted",
    "SitePartition.preemptable",
    "SiteQos.max_submitted",
    "SiteQos.preemptable",
    "TrainConfig.minibatches_per_step",
}
#: Looked up by name, `getattr(groups, role)`.
BY_ROLE = {"GroupsConfig", "PythonConfig"}
SECTIONS = [name for name in config.__all__ if name not in BY_ROLE | FACTS]


@pytest.fixture(scope="module")
def attributes() -> set[str]:
    """Every attribute that the product's code reads."""
    skipped = [REPOSITORY / "miles_hpc" / "core" / name for name in ("config.py", "site.py")]
    trees = [ast.parse(path.read_text()) for path in modules() if path not in skipped]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_read(section: str, attributes: set[str]) -> None:
    fields = {f"{section}.{field}": field for field in getattr(config, section).__struct_fields__}
    unread = {name for name, field in fields.items() if field not in attributes}
    assert unread == {name for name in READ_BY_PEOPLE if name.startswith(f"{section}.")}
