"""Site files: inheritance, aliases, rules of the file itself, and what is listed as not known."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from miles_hpc.cluster.job_plan import plan_job
from miles_hpc.cluster.preflight import check_site
from miles_hpc.cluster.site import role_environment
from miles_hpc.cluster.site_facts import layouts_text, uncovered_facts, unknown_facts
from miles_hpc.core.config import SiteConfig, SiteFabric, SitePartition, SiteSbatch, SiteSource, SiteTopology
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import load_site, resolved_toml, validate
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.site_rules import option_name, site_complaints
from tests.unit.runs import make_gpu_run, make_run, make_site

BASE = """
name = "base"
title = "Base"
aliases = ["b"]
verified = "2026-08-22"
host_patterns = ["base.*"]
gpu_request = "gpus-per-node"
mpi = "pmix"
[env]
A = "1"
B = "1"
[node]
gpus = 4
gpu = "H100"
[[partitions]]
name = "gpu"
roles = ["trainer"]
[[partitions]]
name = "cpu"
roles = ["sandbox"]
[[sources]]
source = "https://example.org/base"
evidence = "documentation"
date = "2026-08"
covers = ["gpu_request"]
"""


def write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.toml").write_text(f'name = "{name}"\n{text}' if "name =" not in text.split("[")[0] else text)


def load(folder: Path, name: str) -> SiteConfig:
    return load_site(name, [folder])


def test_fields_of_the_base_hold_where_the_file_says_nothing(tmp_path: Path) -> None:
    write(tmp_path, "base", BASE)
    write(
        tmp_path,
        "mine",
        'inherits = "base"\nmpi = "pmi2"\n[env]\nB = "2"\n[node]\ngpus = 8\n[[partitions]]\nname = "p"\nroles = []\n'
        '[[sources]]\nsource = "mine"\nevidence = "own"\ndate = "2026-11"\n',
    )
    site = load(tmp_path, "mine")
    assert (site.mpi, site.gpu_request, site.env) == ("pmi2", "gpus-per-node", {"A": "1", "B": "2"})
    assert (site.node.gpus, site.node.gpu) == (8, "H100")
    assert [partition.name for partition in site.partitions] == ["p"]  # lists replace whole
    assert [s.source for s in site.sources if isinstance(s, SiteSource)] == ["mine", "https://example.org/base"]
    # What names the base isn't inherited.
    assert (site.title, site.aliases, site.verified, site.host_patterns, site.inherits) == ("", [], "", [], "")


def test_bases_have_bases_and_a_merged_site_loads_back_equal(tmp_path: Path) -> None:
    write(tmp_path, "base", BASE)
    write(tmp_path, "middle", 'inherits = "base"\nrequeue = false\n')
    write(tmp_path, "mine", 'inherits = "middle"\n[env]\nC = "3"\n')
    site = load(tmp_path, "mine")
    assert (site.requeue, site.env, site.mpi) == (False, {"A": "1", "B": "1", "C": "3"}, "pmix")
    (tmp_path / "mine.toml").write_text(resolved_toml(site))
    assert load(tmp_path, "mine") == site


def test_a_users_file_inherits_from_a_shipped_site(tmp_path: Path) -> None:
    write(tmp_path, "mycluster", 'inherits = "generic_h100_ib"\ninterface = "ib0"\n')
    site = load_site("mycluster", [tmp_path, Path("site_configs")])
    assert (site.interface, site.node.gpus, site.partitions[0].gres) == ("ib0", 8, "h100")
    assert load_site(str(tmp_path / "mycluster.toml"), [Path("site_configs")]) == site


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('inherits = "mine"\n', 'mine.toml: inherits = "mine": a circle, mine -> mine: take one'),
        ('inherits = "other"\n', 'other.toml: inherits = "mine": a circle, mine -> other -> mine: take one'),
        ('inherits = "bas"\n', "mine.toml: inherits = \"bas\": no site of that name: did you mean 'base'?"),
        ('inherits = "zzz"\n', 'mine.toml: inherits = "zzz": no site of that name: expected one of bad, base, '),
        ("inherits = 3\n", "mine.toml: 'inherits' = 3: expected str, seen int"),
        ('inherits = "bad"\n', "bad.toml: unknown key 'node.gpuz': did you mean 'gpu'?"),
        ('inherits = "base"\n[node]\ngpuz = 1\n', "mine.toml: unknown key 'node.gpuz': did you mean 'gpu'?"),
        ('inherits = "base"\nnode = 3\n', "mine.toml: 'node' = 3: expected a table, seen int"),
        ("[fabric]\nknd = 'ib'\n", "mine.toml: unknown key 'fabric.knd': did you mean 'kind'?"),
        ("[fabric]\nkind = 'ipoib'\n", "mine.toml: 'fabric.kind' = \"ipoib\": expected one of 'cxi', 'ib', 'roce', "),
        ("[node]\ncpus = 'many'\n", "mine.toml: 'node.cpus' = \"many\": expected int, seen str"),
        ("[sbatch]\nexclude_allowed = 'no'\n", "mine.toml: 'sbatch.exclude_allowed' = \"no\": expected bool, seen str"),
        (
            "[[partitions]]\nname = 'p'\nroles = ['trianer']\n",
            "mine.toml: 'partitions[0].roles[0]' = \"trianer\": expected one of 'trainer', ",
        ),
        ("[[qos]]\nmax_time = '1'\n", "mine.toml: missing key 'qos[0].name': expected str"),
        ("[[qos]]\nname = 'a'\nmax_time = 'long'\n", "mine.toml: 'qos[0].max_time' = \"long\": expected minutes, "),
        ("[[qos]]\nname = 'a'\n[[qos]]\nname = 'a'\n", "mine.toml: 'qos' lists 'a' twice"),
        ("[[sources]]\nsorce = 'x'\n", "mine.toml: unknown key 'sources[0].sorce': did you mean 'source'?"),
        ("[[sources]]\nsource = 'x'\nevidence = 'own'\ndate = 'now'\n", "mine.toml: 'sources[0].date' = \"now\": "),
        (
            "[[sources]]\nsource = 'x'\nevidence = 'own'\ndate = '2026-08'\ncovers = ['nodes']\n",
            "mine.toml: 'sources[0].covers' names 'nodes': expected keys of the site file",
        ),
        ("[[sources]]\nsource = 'x'\nevidence = 'rumour'\n", "mine.toml: 'sources[0].evidence' = \"rumour\": expected"),
        ("host_patterns = ['a(']\n", "mine.toml: 'host_patterns[0]' = \"a(\": expected a regular expression: "),
        ("slurm_version_min = 'new'\n", "mine.toml: 'slurm_version_min' = \"new\": expected a version"),
        ("compute_internet = 'proxy'\n", "mine.toml: 'compute_internet' = \"proxy\": 'proxy' is missing"),
        (
            "[topology]\nsegment_nodes = 9\n",
            "mine.toml: 'topology.segment_nodes' = 9: needs topology.segment_directive",
        ),
        ("layouts = ['split']\n", "mine.toml: 'layout' = \"hetjob\": expected one of 'layouts', split"),
        ("[sbatch]\nforbidden = ['mem']\n", "mine.toml: 'sbatch.forbidden' has \"mem\": expected a long option"),
        ("[sbatch]\nforbidden = ['--gres']\n", "mine.toml: 'gpu_request' = \"gres\", but --gres is forbidden by "),
        (
            "[sbatch]\nmem = 'forbidden'\nrequired = ['--mem']\n",
            "mine.toml: 'sbatch.required' has \"--mem\", which is forbidden as well",
        ),
        (
            "directives = ['--exclude=n1']\n[sbatch]\nexclude_allowed = false\n",
            "mine.toml: 'directives' states --exclude, which 'sbatch' forbids",
        ),
    ],
)
def test_a_bad_file_is_one_line_with_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "base", BASE)
    write(tmp_path, "other", 'inherits = "mine"\n')
    write(tmp_path, "bad", "[node]\ngpuz = 1\n")
    write(tmp_path, "mine", text)
    with pytest.raises(UserError) as caught:
        load(tmp_path, "mine")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_an_alias_names_a_site(tmp_path: Path) -> None:
    write(tmp_path, "base", BASE)
    (tmp_path / "broken.toml").write_text("= 3")
    assert load(tmp_path, "b").name == "base"
    assert load_site("alps", [Path("site_configs")]).name == "clariden"


@pytest.mark.parametrize(
    ("directive", "name"),
    [
        ("--mem=1G", "--mem"),
        ("--mem 1G", "--mem"),
        ("--exclusive", "--exclusive"),
        ("-w n1", "--nodelist"),
        ("-xn1", "--exclude"),
        ("-Q", "-Q"),
    ],
)
def test_names_of_options(directive: str, name: str) -> None:
    assert option_name(directive) == name


# ------------------------------------------------------------------------------------------------ what follows from it


def site_with(**changes: object) -> SiteConfig:
    partition = SitePartition(name="p", roles=["trainer", "rollout", "sandbox"], gpus_per_node=4)
    site = msgspec.structs.replace(SiteConfig(name="s", partitions=[partition]), **changes)  # type: ignore[arg-type]
    assert list(site_complaints(site)) == []
    return site


def directives(site: SiteConfig, *overrides: str) -> tuple[str, ...]:
    run = make_gpu_run(site, *overrides)
    validate(run, site)
    return plan_job(run, site, RunPaths(Path("/runs/tiny"))).components[0].directives


def test_memory_of_the_whole_node() -> None:
    site = site_with(sbatch=SiteSbatch(mem="zero"))
    assert "--mem=0" in directives(site)
    with pytest.raises(UserError, match=r'mem = "8G": site \'s\' gives whole nodes with --mem=0: leave it out'):
        directives(site, "groups.trainer.mem=8G")


def test_segments() -> None:
    site = site_with(topology=SiteTopology(segment_directive=True, segment_nodes=4))
    assert "--segment=4" in directives(site)
    few = ("groups.trainer.nodes=4", "groups.rollout.nodes=4")
    assert not any(d.startswith("--segment") for d in directives(site, *few))  # one segment holds them
    with pytest.raises(UserError, match=r"nodes = 6: expected a multiple of the site's topology.segment_nodes = 4"):
        directives(site, "groups.trainer.nodes=6")


def test_a_required_option_of_the_user() -> None:
    site = site_with(sbatch=SiteSbatch(required=["--comment"]))
    with pytest.raises(UserError, match=r"site 's' wants --comment in every job: add it to job.extra_directives"):
        directives(site)
    assert "--comment=x" in directives(site, "job.extra_directives=['--comment=x']")


def test_a_site_where_only_split_is_allowed() -> None:
    site = site_with(layout="split", layouts=["split"], layouts_why="het jobs are switched off")
    wanted = r"job.layout: site '.*' takes split \(het jobs are switched off\), not 'hetjob'"
    with pytest.raises(UserError, match=wanted):
        validate(make_run("job.layout=hetjob"), site)
    assert len(plan_job(make_run(), site, RunPaths(Path("/r"))).components) == 1


def test_environment_by_size() -> None:
    site = site_with(env={"A": "1"}, env_single_node={"B": "one"}, env_multi_node={"B": "many"})
    assert role_environment(site, nodes=1) == {"A": "1", "B": "one"}
    assert role_environment(site, nodes=2) == {"A": "1", "B": "many"}


def test_what_is_not_known() -> None:
    unknown = unknown_facts(site_with())
    assert {"fabric.kind", "userns", "file_systems", "partitions[p].max_time", "sbatch.mem"} <= set(unknown)
    assert "fabric.vni_strategy" not in unknown
    assert "mpi (pmi2 is tried)" in unknown
    assert "fabric.vni_strategy" in unknown_facts(site_with(fabric=SiteFabric(kind="cxi")))
    assert "sbatch.exclude_allowed" not in unknown_facts(site_with(sbatch=SiteSbatch(exclude_allowed=False)))
    assert unknown_facts(make_site("laptop")) == []


def test_facts_without_a_source_are_found() -> None:
    assert uncovered_facts(site_with(userns="no")) == ["partitions", "userns"]
    source = SiteSource(source="x", evidence="own", date="2026-08", covers=["partitions", "userns"])
    assert uncovered_facts(site_with(userns="no", sources=[source])) == []
    assert uncovered_facts(site_with(userns="no", sources=["a document"])) == ["partitions", "userns"]


def test_layouts_in_a_word() -> None:
    assert layouts_text(site_with()) == "hetjob?"
    assert layouts_text(site_with(layouts=["hetjob", "split"])) == "hetjob split"


class FakeSlurm:
    """A cluster with one partition and a version."""

    def __init__(self, version: str) -> None:
        self._version = version

    def require(self) -> None:
        pass

    def partitions(self) -> list[str]:
        return ["p"]

    def version(self) -> str:
        return self._version

    def test(self, script: str | Path) -> None:
        pass


def test_check_against_a_cluster() -> None:
    old = check_site(site_with(slurm_version_min="23.11.7"), FakeSlurm("slurm-wlm 22.05.8"))
    assert [finding.text for finding in old if not finding.ok] == [
        "slurm-wlm 22.05.8: the site file asks for 23.11.7 or newer"
    ]
    assert all(finding.ok for finding in check_site(site_with(slurm_version_min="24.05"), FakeSlurm("slurm 24.05.1")))
    hidden = site_with(sbatch=SiteSbatch(partition_stated=False), partitions=make_site("perlmutter").partitions)
    assert all(finding.ok for finding in check_site(hidden, FakeSlurm("slurm 25.11.4")))
