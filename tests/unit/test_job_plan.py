"""Plans: every component states everything; nothing that the site refuses is asked for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from miles_hpc.cluster.job_plan import JobPlan, gpu_option, plan_job
from miles_hpc.cluster.render import render_job
from miles_hpc.cluster.site import data_folder, template_folders
from miles_hpc.core.config import SiteConfig, SitePartition
from miles_hpc.core.errors import UserError
from miles_hpc.core.layouts import roles_in_use
from miles_hpc.core.load import validate
from miles_hpc.core.paths import RunPaths
from tests.unit.runs import make_run, make_site


def plan(*overrides: str, site: SiteConfig | None = None, root: str = "/runs/tiny") -> JobPlan:
    return plan_job(make_run(*overrides), site or make_site(), RunPaths(Path(root)))


def test_components_and_their_order() -> None:
    made = plan("groups.trainer.ranks_per_node=4", "groups.trainer.cpus_per_task=2", "groups.rollout.nodes=3")
    shape = [(c.name, c.partition, c.nodes, c.ntasks, c.ntasks_per_node, c.cpus_per_task) for c in made.components]
    assert shape == [
        ("tiny-trainer", "trainer", 2, 8, 4, 2),
        ("tiny-rollout", "rollout", 3, 3, 1, 1),
        ("tiny-sandbox", "sandbox", 1, 1, 1, 1),
    ]


def test_every_component_states_every_kind_of_directive() -> None:
    made = plan("groups.trainer.mem=8G", "groups.rollout.mem=8G", "groups.sandbox.mem=8G", "job.qos=q", "job.account=a")
    kinds = [{d.partition("=")[0] for d in component.directives} for component in made.components]
    assert kinds[0] == kinds[1] == kinds[2]
    assert kinds[0] >= {"--partition", "--nodes", "--time", "--job-name", "--ntasks-per-node", "--account", "--qos"}
    for component in made.components:
        assert "--signal=B:USR2@120" in component.directives
        assert "--open-mode=append" in component.directives
        assert "--output=/runs/tiny/attempts/slurm-%A.out" in component.directives
        assert len({d.partition("=")[0] for d in component.directives}) == len(component.directives)
    assert len({component.name for component in made.components}) == 3


def test_the_sandbox_may_be_left_out() -> None:
    assert [c.roles for c in plan("groups.sandbox.nodes=0").components] == [("trainer",), ("rollout",)]
    assert roles_in_use(make_run("groups.sandbox.nodes=0")) == ("trainer", "rollout")


def test_a_split_job_has_one_component_with_what_the_greediest_role_needs() -> None:
    made = plan(
        "job.layout=split",
        "groups.trainer.ranks_per_node=4",
        "groups.trainer.cpus_per_task=2",
        "groups.rollout.cpus_per_task=9",
        "groups.rollout.spare_nodes=1",
    )
    (only,) = made.components
    assert (only.roles, only.name, only.partition) == (("trainer", "rollout", "sandbox"), "tiny", "all")
    assert (only.nodes, only.ntasks, only.ntasks_per_node, only.cpus_per_task) == (6, 24, 4, 3)
    assert "--no-kill" in only.directives
    text = render_job(made, template_folders())
    assert "hetjob" not in text


def test_spare_nodes_are_asked_for_in_every_component_of_two_or_more() -> None:
    made = plan("groups.trainer.spare_nodes=1", "groups.sandbox.nodes=2")
    assert [c.nodes for c in made.components] == [3, 2, 2]
    assert all("--no-kill" in c.directives for c in made.components)
    assert not any("--no-kill" in c.directives for c in plan().components)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["groups.trainer.spare_nodes=1"], "every component has two or more nodes, and sandbox has 1"),
        (["job.layout=split", "groups.trainer.partition=trainer", "groups.rollout.partition=rollout"], "state it once"),
        (["job.layout=split", "groups.trainer.mem=8G", "groups.rollout.mem=9G"], "groups.*.mem: trainer '8G'"),
        (["job.layout=split", "groups.trainer.partition=sandbox"], ""),
        (["job.layout=sideways"], "job.layout"),
    ],
)
def test_what_a_layout_asks_of_a_run(overrides: list[str], message: str) -> None:
    if not message:
        validate(make_run(*overrides), make_site())
        return
    with pytest.raises(UserError) as caught:
        validate(make_run(*overrides), make_site())
    assert message in str(caught.value)


def test_requeue_follows_the_site() -> None:
    site = msgspec.structs.replace(make_site(), requeue=False, directives=["--exclusive"])
    for component in plan("job.extra_directives=['--comment=x']", site=site).components:
        assert "--no-requeue" in component.directives
        assert component.directives[-2:] == ("--exclusive", "--comment=x")


@pytest.mark.parametrize(
    ("request_form", "kind", "gpus", "option"),
    [
        ("gres", "h100", 8, "--gres=gpu:h100:8"),
        ("gres", "", 4, "--gres=gpu:4"),
        ("gpus-per-node", "", 4, "--gpus-per-node=4"),
        ("gpus-per-node", "gb300", 4, "--gpus-per-node=gb300:4"),
        ("none", "h100", 8, ""),
        ("gres", "h100", 0, ""),
    ],
)
def test_one_form_of_gpu_request(request_form: str, kind: str, gpus: int, option: str) -> None:
    site = msgspec.structs.replace(make_site(), gpu_request=request_form)
    assert gpu_option(site, SitePartition(name="p", roles=[], gres=kind), gpus) == option


def test_constraints_come_from_group_then_partition() -> None:
    site = msgspec.structs.replace(
        make_site(),
        partitions=[SitePartition(name="p", roles=["trainer", "rollout", "sandbox"], constraint="gpu&hbm80g")],
    )
    made = plan("groups.rollout.constraint=fast", site=site)
    assert '--constraint="gpu&hbm80g"' in made.components[0].directives
    assert "--constraint=fast" in made.components[1].directives


def test_environment_of_the_job() -> None:
    site = msgspec.structs.replace(make_site(), env={"A": "1"}, env_multi_node={"B": "2"}, proxy="http://proxy:3128")
    exports = plan("python_path=['/mine']", site=site).exports
    assert exports["PYTHONSAFEPATH"] == "1"
    assert exports["PYTHONPATH"].endswith(":/mine")
    assert (exports["A"], exports["B"], exports["https_proxy"]) == ("1", "2", "http://proxy:3128")
    alone = [f"groups.{role}.nodes=1" for role in ("trainer", "rollout", "sandbox")]
    assert "B" not in plan(*alone, site=site).exports


@pytest.mark.parametrize("root", ['/runs/a"b', "/runs/a\\b", "/runs/50%off", "/runs/a\nb"])
def test_paths_that_sbatch_cannot_take(root: str) -> None:
    with pytest.raises(UserError, match=r"sbatch can't take this path"):
        plan(root=root)


def test_values_are_quoted_for_bash() -> None:
    site = msgspec.structs.replace(make_site(), env={"TRICK": "a b; $(rm) 'x'"}, modules=["gcc; true"])
    text = render_job(plan("python.controller=/opt/my env/bin/python", site=site, root="/runs/a b"), template_folders())
    assert "export TRICK='a b; $(rm) '\"'\"'x'\"'\"''" in text
    assert "module load 'gcc; true'" in text
    assert "'/opt/my env/bin/python' -P -m launchers.supervisor --run-dir '/runs/a b' &" in text
    assert '#SBATCH --output="/runs/a b/attempts/slurm-%A.out"' in text


def test_a_users_template_is_found_first_and_mistakes_are_named(tmp_path: Path) -> None:
    folders = [tmp_path, data_folder("sbatch")]
    assert render_job(plan(), folders).startswith("#!/bin/bash\n#SBATCH --job-name=tiny-trainer\n")
    (tmp_path / "job.sh.j2").write_text("#!/bin/bash\n# {{ plan.run_name }}\n")
    assert render_job(plan(), folders) == "#!/bin/bash\n# tiny\n"
    (tmp_path / "job.sh.j2").write_text("{{ plan.run_nam }}")
    with pytest.raises(UserError, match=r"job template job.sh.j2: .*run_nam"):
        render_job(plan(), folders)
    with pytest.raises(UserError, match=r"job template other.j2: not found in "):
        render_job(plan(), folders, "other.j2")
