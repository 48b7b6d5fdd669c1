"""The VNI of a job out of what Slurm lists."""

import os
from typing import Any

import pytest

from launchers.agent import take_job_vni
from miles_hpc.cluster.slingshot import job_vni
from miles_hpc.core.config import SiteConfig
from miles_hpc.core.site import SiteFabric


@pytest.mark.parametrize(
    ("listed", "value", "complaint"),
    [
        ("1310,1271", "1271", ""),
        ("1310, 1271", "1271", ""),
        ("1310,1288,1271", "1271", ""),
        ("1310", "1310", "the step's VNI only"),
        ("1310,", "1310", "the step's VNI only"),
        ("", "", "isn't set"),
        (",", "", "isn't set"),
        ("1310:1271", "", "expected numbers"),
        ("1310,x", "", "expected numbers"),
    ],
)
def test_the_last_one_is_the_jobs(listed: str, value: str, complaint: str) -> None:
    found = job_vni(listed)
    assert found.value == value
    assert complaint in found.complaint and bool(found.complaint) == bool(complaint)


@pytest.mark.parametrize(
    ("strategy", "listed", "left", "said"),
    [
        ("job_vni_last", "1310,1271", "1271", ""),
        ("job_vni_last", "1310", "1310", "the step's VNI only"),
        ("job_vni_last", None, None, "isn't set"),
        ("single_step", "1310,1271", "1310,1271", ""),
        ("", "1310,1271", "1310,1271", ""),
    ],
)
def test_an_agent_takes_it_where_the_site_says_so(
    strategy: Any,
    listed: str | None,
    left: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("SLINGSHOT_VNIS", raising=False)
    if listed is not None:
        monkeypatch.setenv("SLINGSHOT_VNIS", listed)
    take_job_vni(SiteConfig(name="x", fabric=SiteFabric(kind="cxi", vni_strategy=strategy)))
    assert os.environ.get("SLINGSHOT_VNIS") == left
    told = capsys.readouterr().err
    assert said in told and bool(told) == bool(said)
